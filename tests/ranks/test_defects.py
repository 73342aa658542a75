"""Defects of PyTorch's FSDP2, shown there and absent here.

PyTorch 2.14 fixed 6, and 2.15 fixed 3 and 5. Tests of other defects are elsewhere:

1   test_meshes.py::test_gradients_are_divided_once_by_the_factor
2   test_meshes.py::test_partial_gradients_stay_with_their_parameters
7   test_meshes.py::test_full_tensor_is_right_between_forward_and_backward, and
    test_secondary_shards_of_what_is_cut_on_other_dims
10  test_tensor_parallel.py::test_parameters_on_a_full_mesh
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from fullshard.frontend.ownership import unit_of, units_below
from fullshard.schedule import MachinePolicy
from tests.kit.rows_semantics import Partly, linears
from tests.ranks.models import Weighs, fill, noise, shard_units
from tests.ranks.net import batch, make, optimizer_of, step
from tests.ranks.pool import RankPool
from tests.ranks.rows import Raised, grads, outcomes, raised, shard, whole
from tests.versions import TORCH, new_in_fsdp2

OK = "nothing raised"
BF16 = torch.bfloat16


def kind(outcome: Any) -> str:
    assert isinstance(outcome, Raised), outcome
    return outcome.kinds[0]


def weigh(model: Any, value: float = 1.0) -> None:
    model(torch.full((5,), value)).backward()


def resets(fsdp: Any) -> float:
    model = fsdp.fully_shard(Weighs())
    model.set_requires_gradient_sync(False)
    weigh(model)
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    weigh(model)
    return float(whole(model.weight.grad)[0])


@new_in_fsdp2
def test_defect_3_reset_forgets_what_is_pending(pool: RankPool) -> None:
    theirs = 2.0 if TORCH < (2, 15) else 1.0
    assert pool.run(2, outcomes, resets) == [(theirs, 1.0)] * 2


def shares_before_the_first_forward(fsdp: Any) -> Any:
    models = [shard(fsdp, make()) for _ in range(2)]
    fsdp.share_comm_ctx(models)

    def run() -> None:
        losses = [model(batch()).square().sum() for model in models]
        for loss in losses:
            loss.backward()

    error = raised(run)
    return error, [whole(model.scale.grad) for model in models]


def test_defect_4_streams_are_shared_before_the_first_forward(pool: RankPool) -> None:
    expected = make()
    expected(batch()).square().sum().backward()
    for (theirs, _), (ours, found) in pool.run(2, outcomes, shares_before_the_first_forward):
        assert kind(theirs) == "IndexError" and ours == OK
        for grad in found:
            assert torch.allclose(grad, expected.scale.grad, rtol=1e-12, atol=1e-12)


def no_sync_beside_a_module_that_never_ran(fsdp: Any) -> Any:
    model = Partly()
    policy = fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32)
    shard_units(model, model.layers, by=fsdp.fully_shard, mp_policy=policy)
    model.set_requires_gradient_sync(False)
    return raised(lambda: model(noise(2, 3), 0).sum().backward())


def test_defect_5_no_sync_with_a_module_that_never_ran(pool: RankPool) -> None:
    for theirs, ours in pool.run(2, outcomes, no_sync_beside_a_module_that_never_ran):
        assert ours == OK
        assert theirs == OK if TORCH >= (2, 15) else kind(theirs) == "AttributeError"


def unfrozen_late(fsdp: Any) -> Any:
    policy = fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    model = fsdp.fully_shard(Weighs(), mp_policy=policy)
    model.requires_grad_(False)
    model(torch.ones(5))
    model.requires_grad_(True)
    error = raised(lambda: weigh(model, 3.0))
    return error, None if error != OK else (whole(model.weight.grad)[0].item(), model.weight.dtype)


def test_defect_6_unfrozen_after_the_first_forward(pool: RankPool) -> None:
    for (theirs, _), ours in pool.run(2, outcomes, unfrozen_late):
        assert ours == (OK, (3.0, torch.float32))
        assert theirs == OK if TORCH >= (2, 14) else kind(theirs) == "RuntimeError"


def called_again_after_a_refusal(fsdp: Any) -> Any:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Conv2d(2, 2, 2))
    model[1].to(memory_format=torch.channels_last)
    first = raised(lambda: fsdp.fully_shard(model))
    kinds = [type(p).__name__ for p in model.parameters()]
    model[1].to(memory_format=torch.contiguous_format)
    return first, kinds, raised(lambda: fsdp.fully_shard(model))


def test_defect_9_a_refusal_changes_nothing(pool: RankPool) -> None:
    for theirs, ours in pool.run(2, outcomes, called_again_after_a_refusal):
        assert kind(theirs[0]) == "NotImplementedError" and "NotImplementedError" in ours[0].kinds
        assert "DTensor" in theirs[1] and kind(theirs[2]) == "AssertionError"
        assert ours[1:] == (["Parameter"] * 4, OK)


def machine_policy(model: nn.Module) -> MachinePolicy:
    """Return the scheduler's policy of our tree."""
    unit = unit_of(model)
    assert unit is not None and unit.engine is not None
    return unit.engine.scheduler.policy


def last_backward_set_early(fsdp: Any) -> Any:
    """Set a block's option before the first forward; return the root's, which alone counts."""
    model = shard(fsdp, make())
    model.blocks[0].set_is_last_backward(False)
    model(batch())
    if unit_of(model) is None:
        return model._get_fsdp_state()._state_ctx.is_last_backward
    return machine_policy(model).is_last_backward


def buffers_set_late(fsdp: Any) -> Any:
    model = shard(fsdp, make())
    step(model, optimizer_of(model))
    model.set_reduce_scatter_max_input_buffers(5)
    if unit_of(model) is None:
        return model._get_fsdp_state()._comm_ctx.reduce_scatter_max_input_buffers
    nbytes = [unit.reduction_nbytes for unit in units_below([model])]
    return 5 if machine_policy(model).reduction_budget == sum(sorted(nbytes)[-5:]) else nbytes


def reset_early(fsdp: Any) -> Any:
    return raised(shard(fsdp, make()).reset_iter_state)


@new_in_fsdp2
def test_defect_11_controls_hold_whenever_they_are_set(pool: RankPool) -> None:
    assert pool.run(2, outcomes, last_backward_set_early) == [(True, False)] * 2
    for theirs, ours in pool.run(2, outcomes, buffers_set_late):
        assert theirs == 1 and ours == 5
    for theirs, ours in pool.run(2, outcomes, reset_early):
        assert kind(theirs) == "AttributeError" and ours == OK


def inference_first(fsdp: Any) -> Any:
    model = shard(fsdp, make())
    with torch.inference_mode():
        model(batch())
    error = raised(lambda: model(batch()).square().sum().backward())
    return error, None if error != OK else grads(model)


def test_defect_12_inference_first(pool: RankPool) -> None:
    expected = make()
    expected(batch()).square().sum().backward()
    for (theirs, _), (ours, found) in pool.run(2, outcomes, inference_first):
        assert kind(theirs) == "RuntimeError" and ours == OK
        for name, param in expected.named_parameters():
            assert torch.allclose(found[name], param.grad, rtol=1e-12, atol=1e-12)


def replaced_late(fsdp: Any) -> Any:
    model = fsdp.fully_shard(linears(1))
    x = noise(2, 3)
    model(x).sum().backward()
    old = model[0].weight
    halves = DTensor.from_local(
        torch.full_like(old.to_local(), 0.5),
        old.device_mesh,
        old.placements,
        shape=old.shape,
        stride=old.stride(),
    )
    model[0].weight = nn.Parameter(halves)
    with torch.no_grad():
        used: Tensor = model(x) - whole(model[0].bias)
    return torch.allclose(used, x.sum(1, keepdim=True).expand(2, 3) / 2)


def child_cast_late(fsdp: Any) -> Any:
    model = fsdp.fully_shard(linears(2))
    model(noise(2, 3)).sum().backward()
    for child in model:
        child.to(torch.float32)
    error = raised(lambda: model(noise(2, 3).float()).sum().backward())
    return error, str(model[0].weight.dtype)


def test_defect_13_parameters_replaced_or_cast_late(pool: RankPool) -> None:
    assert pool.run(2, outcomes, replaced_late) == [(False, True)] * 2
    for (theirs, _), ours in pool.run(2, outcomes, child_cast_late):
        assert kind(theirs) == "RuntimeError" and ours == (OK, "torch.float32")


def said(call: Any) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return OK, ""


def child_after_parent(fsdp: Any) -> None:
    model = fsdp.fully_shard(nn.Sequential(nn.Linear(2, 2)))
    fsdp.fully_shard(model[0])


def reshards_replicas(fsdp: Any) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model: Any = fill(nn.Linear(2, 2))
    for name, param in list(model.named_parameters()):
        placed = distribute_tensor(param.detach(), mesh, [Replicate()])
        setattr(model, name, nn.Parameter(placed))
    dims = fsdp.DataParallelMeshDims(replicate="dp")
    fsdp.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    model.set_reshard_after_forward(True)


def words(fsdp: Any) -> list[tuple[str, str]]:
    calls = (lambda: fsdp.fully_shard([]), lambda: child_after_parent(fsdp))
    return [said(call) for call in (*calls, lambda: reshards_replicas(fsdp))]


@new_in_fsdp2
def test_defect_14_refusals_say_what_is_wrong(pool: RankPool) -> None:
    for theirs, ours in pool.run(2, outcomes, words):
        assert [name for name, _ in theirs] == ["IndexError", "TypeError", "AssertionError"]
        assert theirs[2][1] == ""
        assert ours[0][0] == "ConfigError" and "at least one module" in ours[0][1]
        assert ours[1][0] == "AlreadyShardedError" and "children first" in ours[1][1]
        assert ours[2] == (OK, "")  # replicas are never gathered, so the call has no effect


def pending(fsdp: Any) -> Any:
    model = fsdp.fully_shard(Weighs())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_requires_gradient_sync(False)
    weigh(model)
    optimizer.zero_grad()
    seen = None
    if hasattr(model, "get_pending_gradients"):
        seen = [(p is model.weight, g.unreduced) for p, g in model.get_pending_gradients().items()]
        model.clear_pending_gradients()
    model.set_requires_gradient_sync(True)
    weigh(model)
    return seen, whole(model.weight.grad)


def test_defect_15_pending_gradients_are_seen_and_dropped(pool: RankPool) -> None:
    for (not_seen, theirs), (seen, ours) in pool.run(2, outcomes, pending):
        assert not_seen is None and torch.equal(theirs, torch.full((5,), 2.0))
        ((is_the_sharded_one, unreduced),) = seen
        assert is_the_sharded_one and torch.equal(unreduced, torch.ones(5))
        assert torch.equal(ours, torch.ones(5))
