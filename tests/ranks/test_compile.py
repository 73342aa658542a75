"""``torch.compile`` of blocks and whole models, beside PyTorch's FSDP compiled alike."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fullshard
from tests.ranks.models import GPT, fill, ids, shard_units
from tests.ranks.pool import on_ranks
from tests.ranks.strict import left

STEPS = 4


@dataclass(frozen=True)
class Counts:
    """Dynamo's counts for a program.

    Attributes:

        graphs: number of graphs.
        breaks: number of graph breaks.
        late: number of graphs made after the second step.
    """

    graphs: int
    breaks: int
    late: int


def wrap_per_parameter(lib: Any, layout: Any, model: GPT, kind: str) -> nn.Module:
    """Shard with ``fully_shard`` of ``lib``."""
    options: dict[str, Any] = {} if layout is None else {"layout": layout}
    if kind == "mixed":
        options["mp_policy"] = lib.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    return shard_units(model, model.blocks, by=lib.fully_shard, **options)


def wrap_flat(lib: Any, model: GPT, kind: str) -> nn.Module:
    """Shard with ``FullyShardedDataParallel`` of ``lib``."""
    options: dict[str, Any] = {"use_orig_params": True, "device_id": torch.device("cpu")}
    if kind == "mixed":
        options["mixed_precision"] = lib.MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    for index, block in enumerate(model.blocks):
        model.blocks[index] = lib.FullyShardedDataParallel(block, **options)
    return lib.FullyShardedDataParallel(model, **options)


Wrap = Callable[[GPT, str], nn.Module]


def both(face: str) -> tuple[Wrap, Wrap]:
    """Return PyTorch's and our way to shard a model for ``face``."""
    if face == "flat":
        return partial(wrap_flat, theirs), partial(wrap_flat, fullshard)
    layout = fullshard.Ragged() if face == "ragged" else None
    return (
        partial(wrap_per_parameter, theirs, None),
        partial(wrap_per_parameter, fullshard, layout),
    )


def train(wrap: Wrap, scope: str, kind: str) -> tuple[list[float], Counts]:
    """Train a small GPT, compiled as ``scope`` says; return its losses and Dynamo's counts."""
    torch._dynamo.reset()
    counters.clear()
    model: Any = fill(GPT(layers=3))
    if kind == "checkpointed":
        model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    if scope == "blocks before":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    run = model = wrap(model, kind)
    if scope == "blocks after":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    if scope == "model":
        run = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, graphs = [], []
    for step in range(STEPS):
        tokens = ids(2, 7, vocab=53, seed=10 * step + dist.get_rank())
        loss = GPT.loss(run(tokens).float(), tokens.roll(1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        graphs.append(counters["stats"]["unique_graphs"])
    breaks = sum(counters["graph_break"].values())
    return losses, Counts(graphs[-1], breaks, graphs[-1] - graphs[1])


@on_ranks(2, timeout_s=240)
@pytest.mark.parametrize("kind", ["plain", "mixed", "checkpointed"])
@pytest.mark.parametrize("scope", ["blocks before", "blocks after", "model"])
@pytest.mark.parametrize("face", ["per-parameter", "ragged", "flat"])
def test_no_more_breaks_and_graphs_than_pytorch(face: str, scope: str, kind: str) -> None:
    """Compiling makes at most as many graphs and graph breaks as with PyTorch's FSDP."""
    warnings.simplefilter("ignore")  # warnings of the compiler
    their_wrap, our_wrap = both(face)
    with left():
        _, their_counts = train(their_wrap, scope, kind)
        losses, our_counts = train(our_wrap, scope, kind)
    torch._dynamo.reset()
    expected, _ = train(our_wrap, "nothing", kind)
    far, torchs, ours = (
        max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        their_counts,
        our_counts,
    )
    assert far <= (1e-2 if kind == "mixed" else 1e-6)
    assert 0 < ours.graphs <= torchs.graphs
    assert ours.breaks <= torchs.breaks
    assert ours.late == 0
