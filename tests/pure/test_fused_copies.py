"""Copies that a device makes in one kernel give the numbers of the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fullshard._torch import device as _device
from fullshard.comm.means import begun
from fullshard.device import StorageMeter
from fullshard.engine.policy import WireCheck, WirePolicy
from fullshard.engine.reduce_input import Reduced, ReduceInput
from fullshard.layout import ParamSpec, PerParameter, Ragged, even_from, in_rows, plan_slots, subset
from tests.pure.layout_model import aligns, elements, scatter, spec_lists, values, worlds

CPU = torch.device("cpu")


@given(spec_lists(), worlds, aligns)
def test_slots_are_the_chunks_of_a_parameter(
    params: list[ParamSpec], world: int, align: int
) -> None:
    layout = PerParameter().build(params, world, align)
    slots = plan_slots(layout)
    if slots is None:
        return
    shards = scatter(layout, values(layout))
    filled = 0
    for slot in slots:
        rows = torch.tensor(values(layout)[slot.param]).view(-1, slot.unit)
        assert slot.offset >= filled
        filled = slot.offset + slot.chunk
        each = slot.chunk // slot.unit
        for rank in range(world):
            chunk = rows[rank * each : (rank + 1) * each].flatten().tolist()
            assert shards[rank][slot.offset : slot.offset + len(chunk)] == chunk
    assert sum(slot.chunk == 0 for slot in slots) == 0


@given(spec_lists(), worlds)
def test_parameters_cut_on_their_first_dim_have_slots(params: list[ParamSpec], world: int) -> None:
    by_rows = [ParamSpec(spec.name, spec.shape) for spec in params if spec.numel]
    layout = PerParameter().build(by_rows, world, 8)
    assert (plan_slots(layout) is not None) == bool(by_rows)


@given(spec_lists(), worlds, aligns, st.integers(0, 40), st.booleans())
def test_boxes_by_rows_hold_the_same_elements(
    params: list[ParamSpec], world: int, align: int, most: int, is_ragged: bool
) -> None:
    layout = (Ragged() if is_ragged else PerParameter()).build(params, world, align)
    boxes = layout.copies(layout.shard_numel + 1)
    cut = in_rows(boxes, most=most)
    assert sorted((c.param, e) for c in cut for e in elements(c)) == sorted(
        (c.param, e) for c in boxes for e in elements(c)
    )
    before = sum(len(box.sizes) == 1 for box in boxes)
    assert sum(len(box.sizes) == 1 for box in cut) <= max(most, before)


@given(spec_lists(), worlds, aligns)
def test_what_is_even_goes_on_to_the_end(params: list[ParamSpec], world: int, align: int) -> None:
    layout = PerParameter().build(params, world, align)
    stop = layout.shard_numel
    start = even_from(layout, stop)
    above = layout.copies(stop - start, above=start)
    for box in above:
        assert box.sizes[0] == world or len(box.sizes) == 1
    together = sorted((c.param, e[0]) for c in above for e in elements(c))
    together += sorted(
        (c.param, e[0]) for c in layout.copies(start, below=start) for e in elements(c)
    )
    assert sorted(together) == sorted(
        (c.param, e[0]) for c in layout.copies(stop) for e in elements(c)
    )


SHAPES = [(8, 3), (12, 4), (5, 3), (13,), (1, 6), (24,), (0, 4), (7, 12), (16, 2)]


def filled(
    layout: Any,
    grads: list[Tensor | None],
    numbers: tuple[int, ...],
    dtype: torch.dtype,
    wire: WirePolicy = WirePolicy(),
) -> Tensor:
    spec: Any = SimpleNamespace(
        layout=layout, clean_padding=False, wire=wire, wire_check=WireCheck()
    )
    if len(numbers) < len(layout.params):
        spec.layout = subset(layout, numbers)
    names = tuple(param.name for param in layout.params)
    reduced = Reduced(numbers, spec, names, StorageMeter())
    buffer = reduced.input(dtype, CPU)
    assert isinstance(buffer, ReduceInput)
    buffer.fill(grads)  # the next fill must not depend on this one
    buffer.free()
    buffer._buffer.allocate()
    buffer._buffer.tensor.fill_(torch.nan)
    full = buffer.fill(grads).view(layout.world, -1)
    kept = torch.zeros_like(full)
    for box in spec.layout.copies(reduced.row):
        where = box.sizes, box.staging_strides, box.staging_offset
        kept.as_strided(*where).copy_(full.as_strided(*where))
    flags = slice(spec.layout.shard_numel, spec.layout.shard_numel + len(names))
    kept[:, flags] = full[:, flags]
    if wire.has_blocks:  # padding would affect the scale of its block
        between = full[:, : spec.layout.shard_numel], kept[:, : spec.layout.shard_numel]
        assert torch.equal(*between)
    return kept


@pytest.mark.parametrize("strategy", [PerParameter(), Ragged()])
@pytest.mark.parametrize("fused", [False, True])
def test_with_blocks_nothing_lies_between_gradients(strategy: Any, fused: bool) -> None:
    params = [ParamSpec(f"p{i}", shape) for i, shape in enumerate(SHAPES)]
    layout = strategy.build(params, 3, 16)
    for absent in (None, 3):
        grads = [None if i == absent else torch.ones(shape) for i, shape in enumerate(SHAPES)]
        numbers = tuple(range(len(SHAPES)))
        with mock.patch.object(_device, "fuses_copies", lambda device: fused):
            filled(layout, grads, numbers, torch.float32, WirePolicy(reduce="int8"))


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("strategy", [PerParameter(), Ragged(), Ragged("row")])
@pytest.mark.parametrize("frozen", [(), (1, 3)])
@pytest.mark.parametrize("missing", [(), (0, 4, 5)])
@pytest.mark.parametrize("came", ["bf16", "fp32", "fp16", "both"])
def test_gradients_are_laid_out_as_on_a_cpu(
    world: int, strategy: Any, frozen: Any, missing: Any, came: str
) -> None:
    params = [ParamSpec(f"p{i}", shape) for i, shape in enumerate(SHAPES)]
    layout = strategy.build(params, world, 8)
    numbers = tuple(i for i in range(len(SHAPES)) if i not in frozen)
    generator = torch.Generator().manual_seed(0)
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
    grads: list[Tensor | None] = []
    for i in numbers:
        grad = torch.randn(SHAPES[i], generator=generator)
        grad = grad.to(dtypes.get(came, (torch.bfloat16, torch.float32)[i % 2]))
        if i == 7:
            grad = grad.t().contiguous().t()  # dense, but not contiguous
        grads.append(None if i in missing else grad)
    expected = filled(layout, grads, numbers, torch.float32)
    with mock.patch.object(_device, "fuses_copies", lambda device: True):
        assert torch.equal(filled(layout, grads, numbers, torch.float32), expected)
    assert expected.any()


@pytest.mark.parametrize("world", [2, 8, 1024, 1500])
@pytest.mark.parametrize("averages", [True, False])
def test_means_in_fp16_lose_no_small_numbers(world: int, averages: bool) -> None:
    """NCCL's own mean divides first, and 1e-5 / 1,024 underflows in fp16."""
    values = torch.full((4,), 1e-5, dtype=torch.float16)
    expected = values.float()
    op, divisor = begun(values, world, averages=averages)
    assert op == dist.ReduceOp.SUM
    together = (values.float() * world).half().float() / divisor
    assert torch.allclose(together, expected, rtol=0.15)
    wide = torch.ones(4)
    assert begun(wide, world, averages=True) == (dist.ReduceOp.AVG, 1)
    assert begun(wide, world, averages=False) == (dist.ReduceOp.SUM, world)
    assert wide.eq(1).all()
