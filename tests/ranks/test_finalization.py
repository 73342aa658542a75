"""Backwards that ``finalize_backward`` ends: the same gradients as without it, and PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fullshard as ours
from fullshard import fully_shard
from fullshard.errors import ArgumentTypeError, ProtocolError
from fullshard.frontend.ownership import unit_of
from fullshard.schedule import Op, Transcript
from tests.ranks.models import noise, shard_units
from tests.ranks.net import Net, apart, batch, make, optimizer_of, shard, step
from tests.ranks.pool import on_ranks

EXACT = 1e-12
beside_torchs = pytest.mark.skipif(
    not hasattr(theirs, "GradientReductionHandle"), reason="PyTorch has it from 2.15 on"
)


def shard_by(kit: ModuleType, model: Net, **options: Any) -> Any:
    return shard_units(model, model.blocks, by=kit.fully_shard, **options)


def grads_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    grads = {name: param.grad for name, param in model.named_parameters()}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


def worst_difference(model: nn.Module, plain: nn.Module) -> float:
    found, expected = grads_of(model), grads_of(plain)
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        assert (grad is None) == (expected[name] is None), name
    return max(
        (grad - expected[name]).abs().max().item()
        for name, grad in found.items()
        if grad is not None
    )


def finalize(model: Any, async_op: bool) -> None:
    handle = model.finalize_backward(async_op=async_op)
    if async_op:
        handle.wait()
        handle.wait()
    else:
        assert handle is None


def run(model: Any, mode: str, async_op: bool, steps: int = 2) -> dict[str, Any]:
    """Run two backwards a step; "late" defers all reductions, "mixed" the first, "each" none."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_manual_backward_finalization(True)
    grads: dict[str, Any] = {}
    for number in range(steps):
        for part in range(2):
            if mode == "late":
                model.set_requires_gradient_sync(False)
                model.set_reshard_after_backward(False)
            elif mode == "mixed":
                model.set_requires_gradient_sync(part == 1)
            model(batch(2 * number + part)).square().mean().backward()
        if mode == "late":
            model.set_requires_gradient_sync(True)
            model.set_reshard_after_backward(True)
        finalize(model, async_op)
        assert all(isinstance(param, DTensor) for param in model.parameters())
        grads = grads_of(model)
        optimizer.step()
        optimizer.zero_grad()
    model.set_manual_backward_finalization(False)
    return grads


def run_plain(plain: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(2):
        for part in range(2):
            plain(batch(2 * number + part)).square().mean().backward()
        grads = {name: param.grad for name, param in plain.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return grads


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("mode", ["late", "mixed", "each"])
@on_ranks(1, 2, 3, 4)
def test_gradients_are_those_of_the_whole_model(world: int, mode: str, async_op: bool) -> None:
    replicated = world == 4
    plain = make()
    options: dict[str, Any] = {}
    if replicated:
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
    model = shard(copy.deepcopy(plain), **options)
    grads, expected = run(model, mode, async_op), run_plain(plain)
    apart_by = [(grads[name] - expected[name]).abs().max().item() for name in expected]
    step(model, optimizer_of(model))  # backward finalizes itself again
    step(plain, optimizer_of(plain))
    engine = unit_of(model).engine
    assert engine.scheduler.idle and not len(engine.scheduler.reductions)
    assert not any(engine.meter.held_nbytes.values())
    found = [*apart_by, apart(model, plain)]
    assert max(found) <= EXACT


@beside_torchs
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("mode", ["late", "mixed", "each"])
@on_ranks(2, 4)
def test_gradients_are_pytorchs(world: int, mode: str, async_op: bool) -> None:
    replicated = world == 4
    options: dict[str, Any] = {}
    if replicated:
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
    one, other = (run(shard_by(kit, make(), **options), mode, async_op) for kit in (ours, theirs))
    assert max((one[name] - other[name]).abs().max().item() for name in one) <= EXACT


@on_ranks(1, 2, 3)
def test_gradients_that_the_caller_assigned_are_reduced() -> None:
    """Gradients that the caller assigned, as in a zero-bubble pipeline, are reduced."""
    plain = make()
    model = shard(copy.deepcopy(plain), reshard_after_forward=False)
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    for number in range(2):
        for one in (plain, model):
            loss = one(batch(number)).square().mean()
            params = list(one.parameters())  # unsharded parameters
            grads = torch.autograd.grad(loss, params)
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad if param.grad is None else param.grad + grad
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    model.finalize_backward()
    assert worst_difference(model, plain) <= EXACT


@on_ranks(2)
def test_reductions_begin_with_the_call_and_end_with_the_wait() -> None:
    """The call starts all reductions, and the wait ends the last one."""
    begun, ended = Op.REDUCE_SCATTER, Op.FINISH_REDUCE
    model = shard(make())
    engine = unit_of(model).engine
    engine.recorder = transcript = Transcript()
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    model(batch()).sum().backward()
    counts = []

    def count() -> None:
        ops = [action.op for action in transcript.actions()]
        counts.append({op: ops.count(op) for op in (Op.REDUCE_SCATTER, Op.FINISH_REDUCE)})
        transcript.events.clear()

    count()
    model.set_requires_gradient_sync(True)
    handle = model.finalize_backward(async_op=True)
    count()
    handle.wait()
    count()
    model.finalize_backward()
    count()
    assert counts == [
        {begun: 0, ended: 0},
        {begun: 3, ended: 2},  # one reduction at a time is in flight, as usual
        {begun: 0, ended: 1},
        {begun: 0, ended: 0},
    ]


def error_of(what: Callable[[], object]) -> type[Exception] | None:
    try:
        what()
    except Exception as error:
        return type(error)
    return None


def refusals(kit: ModuleType) -> list[str | None]:
    """Return the builtin error of each misuse, in the order of a step."""
    found: list[type[Exception] | None] = []

    def ask(what: Callable[[], object]) -> None:
        found.append(error_of(what))

    model = shard_by(kit, make())
    ask(model.finalize_backward)  # before the first forward
    ask(lambda: model.finalize_backward(async_op=True).wait())
    block = model.blocks[0]
    hook = block.register_full_backward_pre_hook(lambda *_: ask(model.finalize_backward))
    loss = model(batch()).sum()
    ask(lambda: block.set_manual_backward_finalization(True))
    ask(model.finalize_backward)  # backward finalizes itself
    model.set_manual_backward_finalization(True)
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    loss.backward()
    hook.remove()
    ask(lambda: model.set_manual_backward_finalization(False))
    ask(block.finalize_backward)
    model.set_requires_gradient_sync(True)
    handle = model.finalize_backward(async_op=True)
    ask(lambda: model.finalize_backward(async_op=True))
    ask(model.finalize_backward)
    ask(lambda: model(batch()))
    ask(lambda: model.set_manual_backward_finalization(False))
    handle.wait()
    ask(handle.wait)
    ask(model.finalize_backward)
    model.set_manual_backward_finalization(False)
    model.set_manual_backward_finalization(True)
    model(batch()).sum().backward()
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    ask(handle.wait)
    model.set_manual_backward_finalization(False)
    ask(lambda: model(batch()).sum().backward())
    runtime = {
        error: "RuntimeError" for error in found if error and issubclass(error, RuntimeError)
    }
    return [runtime.get(error, error and error.__name__) for error in found]


EXPECTED = (
    [None, None, "RuntimeError", "RuntimeError"]
    + ["RuntimeError"] * 3
    + ["RuntimeError"] * 4
    + [None, None, "RuntimeError", None]
)


@on_ranks(1, 2, 3)
def test_what_cannot_work_is_refused() -> None:
    assert refusals(ours) == EXPECTED


@on_ranks(2)
@beside_torchs
def test_pytorch_refuses_the_same() -> None:
    assert refusals(theirs) == EXPECTED


@on_ranks(2)
def test_errors_say_what_to_do() -> None:
    model = shard(make())
    with pytest.raises(ArgumentTypeError, match="expected a bool"):
        model.set_manual_backward_finalization(1)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match=r"unit blocks\.0, expected the root"):
        model.blocks[0].set_manual_backward_finalization(True)
    block = fully_shard(nn.Linear(4, 4))
    block.set_manual_backward_finalization(True)
    with pytest.raises(ProtocolError, match="not be the root any more"):
        fully_shard(nn.Sequential(block, nn.Linear(4, 4)))
    assert isinstance(block.weight, DTensor)
    block.set_manual_backward_finalization(False)
    fully_shard(nn.Sequential(block, nn.Linear(4, 4)))


@on_ranks(4)
def test_partial_gradients_are_not_finalized() -> None:
    """``finalize_backward`` refuses gradients that are to stay partial, and later reduces all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
    plain = make()
    model = shard(copy.deepcopy(plain), mesh=mesh)
    model.set_manual_backward_finalization(True)
    for sync in (True, False):  # partial, then pending
        model.set_requires_gradient_sync(sync)
        model.set_requires_all_reduce(False)
        model(batch(1)).square().mean().backward()
        plain(batch(1)).square().mean().backward()
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(False)
        with pytest.raises(ProtocolError, match=r"set_requires_all_reduce\(True\)"):
            model.finalize_backward()
    model.set_requires_all_reduce(True)
    model.finalize_backward()
    assert worst_difference(model, plain) <= EXACT


@on_ranks(2)
@pytest.mark.parametrize("async_op", [False, True])
def test_after_a_backward_that_died(async_op: bool) -> None:
    """After a failed backward and ``reset_iter_state``, the next step is right."""
    plain = make()
    model = shard(copy.deepcopy(plain))
    model.set_manual_backward_finalization(True)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    hook = model.blocks[0].register_full_backward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(batch(7)).sum().backward()
    hook.remove()
    model.reset_iter_state()
    model.zero_grad()
    for one in (plain, model):
        one(batch(3)).square().mean().backward()
    finalize(model, async_op)
    assert worst_difference(model, plain) <= EXACT


@on_ranks(2)
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("broken", ["blocks.0", "head"])
def test_after_a_finalization_that_failed(async_op: bool, broken: str) -> None:
    """Everything else is ended, so that the next step needs no ``reset_iter_state``."""
    plain = make()
    model = shard(copy.deepcopy(plain))
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    model(batch(7)).sum().backward()

    def fail(_: object) -> None:
        raise ZeroDivisionError

    hook = model.get_submodule(broken).weight.register_post_accumulate_grad_hook(fail)
    model.set_requires_gradient_sync(True)
    with pytest.raises(ZeroDivisionError):
        finalize(model, async_op)
    hook.remove()
    model.zero_grad()
    model.clear_pending_gradients()
    for one in (plain, model):
        one(batch(3)).square().mean().backward()
    finalize(model, async_op)
    assert worst_difference(model, plain) <= EXACT


@on_ranks(2)
@pytest.mark.parametrize("how", ["last", "manual", "handle"])
def test_what_is_under_way_is_not_lost_by_a_cast(how: str) -> None:
    """A cast keeps gradients whose reductions are in flight."""
    plain = make()
    model = shard(copy.deepcopy(plain))
    if how == "last":
        model.set_is_last_backward(False)
    else:
        model.set_manual_backward_finalization(True)
    for one in (plain, model):
        one(batch(0)).square().mean().backward()
    if how == "handle":
        handle = model.finalize_backward(async_op=True)
        with pytest.raises(ProtocolError, match=r"before wait\(\) of the handle"):
            model.float()
        handle.wait()
    for one in (plain, model):
        one.float()
    model.set_is_last_backward(True)
    for one in (plain, model):
        one(batch(1, torch.float32)).square().mean().backward()
    if how != "last":
        model.finalize_backward()
    assert worst_difference(model, plain) <= 1e-6


@on_ranks(1, 2)
def test_units_that_no_backward_reached_have_no_gradients() -> None:
    """A parameter that no backward reached, or that was frozen, has no gradient."""
    model = shard(make())
    model.blocks[1].weight.requires_grad_(False)
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    model.blocks[0](noise(4, 6, seed=1)).sum().backward()
    model.set_requires_gradient_sync(True)
    model.finalize_backward()
    found = grads_of(model)
    found = [(found[name] is None) != name.startswith("blocks.0") for name in found]
    assert all(found)


@on_ranks(2, 3)
def test_gradients_that_wait_outlive_a_change_of_wires() -> None:
    plain = make()
    model: Any = shard(copy.deepcopy(plain))
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    for one in (model, plain):
        for part in range(2):
            one(batch(part)).square().mean().backward()
    model.set_separate_reduce_scatter_group()  # forgets the unsharded parameters
    model.set_requires_gradient_sync(True)
    finalize(model, False)
    assert worst_difference(model, plain) <= EXACT
    model.zero_grad()
    plain.zero_grad()
    for one in (model, plain):
        one(batch(2)).square().mean().backward()
    finalize(model, False)
    assert worst_difference(model, plain) <= EXACT
