"""``patch_torch`` with process groups: PyTorch's collectives, values of the unsharded model."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import fullshard
from fullshard import comm
from fullshard._torch import collectives as _collectives
from fullshard.compat import patch_torch
from tests.ranks.models import fill, shard_units
from tests.ranks.net import Net, apart, batch, make, optimizer_of, step
from tests.ranks.pool import RankPool, on_ranks

EXACT = 1e-12
GATHER, REDUCE = (call.__name__ for call in _collectives.public_collectives())
COLLECTIVES = (GATHER, REDUCE, "all_reduce")


def shard(model: Net, mesh: Any = None, **options: Any) -> Any:
    """Shard as a program for PyTorch does, with PyTorch's or the patched ``fully_shard``."""
    return shard_units(model, model.blocks, by=fsdp.fully_shard, mesh=mesh, **options)


class Call(NamedTuple):
    """A call of a function of ``torch.distributed``."""

    name: str
    dtype: torch.dtype
    op: str


@contextmanager
def watched() -> Iterator[list[Call]]:
    """Record the calls of ``torch.distributed`` collectives in the block."""
    calls: list[Call] = []

    def watch(name: str) -> Callable[..., Any]:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            ops = [x for x in (*args, *kwargs.values()) if isinstance(x, dist.ReduceOp.RedOpType)]
            calls.append(Call(name, tensors[-1].dtype, str(*ops)))
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, watch(name)))
        yield calls


def mesh_of(name: str) -> Any:
    shapes: dict[str, tuple[int, ...]] = {"1-D": (4,), "2-D": (2, 2)}
    shape = shapes[name]
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def what_is_issued(
    patched: bool, mesh: str, reshard: bool | None, dtypes: tuple[torch.dtype, ...]
) -> tuple[Counter[Call], Counter[str]]:
    """Return the function calls and operators of the collectives in two steps."""
    dtype, param_dtype, reduce_dtype = dtypes
    with patch_torch() if patched else nullcontext():
        policy = fsdp.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        options = {"reshard_after_forward": reshard, "mp_policy": policy}
        model = shard(make(dtype), mesh_of(mesh), **options)
        assert isinstance(model, fullshard.FSDPModule) == patched
        counts: Counter[str] = Counter()
        with watched() as calls:
            for number in range(2):
                with CommDebugMode() as operators:
                    model(batch(number, dtype)).float().square().mean().backward()
                counts.update({str(op): num for op, num in operators.get_comm_counts().items()})
    return Counter(calls), counts


DTYPES = [
    (torch.float64, None, None),
    (torch.float32, None, None),
    (torch.float32, torch.bfloat16, None),
    (torch.float32, torch.bfloat16, torch.float32),
    (torch.float32, torch.float16, None),
]


@on_ranks(4)
@pytest.mark.parametrize(("mesh", "expected"), [("1-D", 118), ("2-D", 160)])
def test_what_is_issued_is_what_fsdp2_issues(mesh: str, expected: int) -> None:
    """A patched program issues FSDP2's collectives, with the same dtypes and operations."""
    warnings.simplefilter("ignore")  # warnings of CommDebugMode
    total = 0
    for dtypes in DTYPES:
        for reshard in (True, False, None) if dtypes[0] is torch.float64 else (True,):
            ours = what_is_issued(True, mesh, reshard, dtypes)
            theirs = what_is_issued(False, mesh, reshard, dtypes)
            assert ours == theirs, (dtypes, reshard, ours, theirs)
            total += sum(ours[0].values())
    assert total == expected


@on_ranks(2, 3, 4)
def test_a_model_of_a_patched_program_trains_as_unsharded(world: int) -> None:
    for mesh in (None, mesh_of("2-D")) if world == 4 else (None,):
        plain = make()
        with patch_torch():
            model = shard(copy.deepcopy(plain), mesh)
        optimizers = [optimizer_of(plain), optimizer_of(model)]
        for number in range(3):  # after the patch ended
            for one, optimizer in zip((plain, model), optimizers, strict=True):
                step(one, optimizer, number)
        assert apart(model, plain) <= EXACT


@on_ranks(2)
def test_our_own_layouts_call_the_same_functions() -> None:
    """Ragged shards, and large weights gathered in place, use the same functions."""
    plain, large = make(), fill(nn.Linear(512, 512).double(), scale=0.1)
    with patch_torch(), watched() as calls:
        ragged = shard(copy.deepcopy(plain), layout=fullshard.Ragged())
        direct = fsdp.fully_shard(copy.deepcopy(large), mesh=init_device_mesh("cpu", (2,)))
        for one in (plain, ragged):
            step(one, optimizer_of(one))
        calls.clear()
        for one in (large, direct):
            one(torch.ones(1, 512, dtype=torch.float64)).square().mean().backward()
    names = [call.name for call in calls]
    assert names == [GATHER, GATHER, REDUCE]
    far = [apart(ragged, plain), apart_in_gradients(large, direct)]
    assert max(far) <= EXACT


@on_ranks(2, 3)
def test_low_precision_is_that_of_fsdp2() -> None:
    """Low-precision training stays close to FSDP2's, in dtypes whose sums depend on their order."""
    far = []
    for param_dtype, reduce_dtype in [(None, None), *(dtypes[1:] for dtypes in DTYPES[2:])]:
        models = []
        for patched in (True, False):
            with patch_torch() if patched else nullcontext():
                policy = fsdp.MixedPrecisionPolicy(
                    param_dtype=param_dtype, reduce_dtype=reduce_dtype
                )
                model = shard(make(torch.float32), mp_policy=policy)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for number in range(3):
                    model(batch(number, torch.float32)).float().square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                models.append(model)
        far.append(apart(*models))
    fp32, bf16, bf16_and_fp32, fp16 = far
    assert fp32 <= 1e-6 and bf16 <= 1e-3 and bf16_and_fp32 <= 1e-3 and fp16 <= 1e-3


@on_ranks(4)
def test_means_in_fp16_do_not_overflow() -> None:
    """Means fit in fp16 where sums do not."""
    mesh = init_device_mesh("cpu", (4,))
    with patch_torch():
        reduce = comm.collectives_of(mesh)
    source = torch.full((8,), 30_000.0, dtype=torch.float16)
    output = torch.empty(2, dtype=torch.float16)
    reduce.reduce_scatter_mean(output, source).wait()
    values = torch.full((3,), 30_000.0, dtype=torch.float16)
    reduce.all_reduce_mean(values).wait()
    found = max((output - 30_000.0).abs().max().item(), (values - 30_000.0).abs().max().item())
    assert found == 0.0


def apart_in_gradients(plain: nn.Module, sharded: nn.Module) -> float:
    return max(
        (one.grad - other.grad.full_tensor()).abs().max().item()
        for one, other in zip(plain.parameters(), sharded.parameters(), strict=True)
    )


@on_ranks(2, 3, 4)
def test_pytorchs_own_trains_before_during_and_after() -> None:
    """PyTorch's models train before, during and after the patch; ours during and after."""
    plain, theirs = make(), shard(make())
    models = [plain, theirs]
    with patch_torch():
        ours = shard(make())
        models.append(ours)
        state = fsdp.fully_shard.state(ours)  # type: ignore[attr-defined]
        known = [
            isinstance(ours, fsdp.FSDPModule) and not isinstance(theirs, fsdp.FSDPModule),
            len(state._state_ctx.all_states) == 3,
            state in state._state_ctx.all_states,
        ]
        optimizers = [optimizer_of(model) for model in models]
        for one, optimizer in zip(models, optimizers, strict=True):
            step(one, optimizer, 0)
        theirs.set_requires_gradient_sync(False)  # PyTorch finds modules by PyTorch's class
        theirs(batch(8)).sum().backward()
        assert all(param.grad is None for param in theirs.parameters())
        theirs.set_requires_gradient_sync(True)
        theirs(batch(8)).sum().backward()
        for model in (plain, ours):
            model(batch(8)).sum().mul(2).backward()
        known.append(max(apart_in_gradients(plain, m) for m in (theirs, ours)) <= EXACT)
    models.append(shard(make()))
    known.append(not isinstance(models[-1], fullshard.FSDPModule))
    for one, optimizer in zip(models, optimizers, strict=False):
        optimizer.zero_grad()
        step(one, optimizer, 1)
    known.append(max(apart(model, plain) for model in (theirs, ours)) <= EXACT)
    anew = make()
    for one in (anew, models[-1]):
        step(one, optimizer_of(one), 0)
    result = [*known, apart(models[-1], anew) <= EXACT]
    assert result == [True] * 7


@on_ranks(2)
def test_wrappers_of_pytorchs_train_on() -> None:
    """A PyTorch FSDP1 wrapper made before the patch trains on while PyTorch is patched."""
    plain = make()
    cpu = torch.device("cpu")
    model = fsdp.FullyShardedDataParallel(copy.deepcopy(plain), device_id=cpu, use_orig_params=True)
    pairs = [(one, optimizer_of(one)) for one in (plain, model)]
    losses = []
    for number in range(3):
        with patch_torch() if number else nullcontext():
            losses.append([step(one, optimizer, number) for one, optimizer in pairs])
    assert max(abs(one - other) for one, other in losses) <= 1e-12


@on_ranks(2)
def test_policies_of_pytorchs_classes_do() -> None:
    """Policies of PyTorch's classes, made before the patch, still work."""
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.float64, cast_forward_inputs=False)
    plain, *models = make(), make(), make()
    for model, offload in zip(
        models, (fsdp.OffloadPolicy(), fsdp.CPUOffloadPolicy(pin_memory=False)), strict=True
    ):
        with patch_torch():
            shard(model, mp_policy=policy, offload_policy=offload)
    for one in (plain, *models):
        step(one, optimizer_of(one))
    assert max(apart(model, plain) for model in models) <= EXACT


@on_ranks(2)
def test_what_is_sharded_later_communicates_in_our_way_again() -> None:
    mesh = init_device_mesh("cpu", (2,))
    before = comm.collectives_of(mesh)
    with patch_torch():
        meanwhile = comm.collectives_of(mesh)
        again = comm.collectives_of(mesh)
    after = comm.collectives_of(mesh)
    found = [
        type(before) is comm.C10d and before is after,
        type(meanwhile) is comm.Public and meanwhile is again,
    ]
    assert found == [True, True]


@on_ranks(2, timeout_s=120)
def test_a_patched_program_may_compile() -> None:
    """Compiled blocks and a compiled model train alike."""
    warnings.simplefilter("ignore")  # warnings of the compiler
    torch._dynamo.reset()
    far = []
    for what in ("blocks", "model"):
        plain = make()
        with patch_torch():
            model = shard(copy.deepcopy(plain))
            run = model
            if what == "model":
                run = torch.compile(model, backend="aot_eager")
            else:
                for block in model.blocks:
                    block.compile(backend="aot_eager")
            for one in (plain, run):
                optimizer = optimizer_of(one)
                for number in range(3):
                    one(batch(number)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            classes = fsdp._fully_shard._fully_shard.get_cls_to_fsdp_cls()
            assert classes[Net] is type(model) and classes[nn.Linear] is type(model.blocks[0])
        far.append(apart(model, plain))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert max(far) <= EXACT


THEIR_FIELDS = {field.name for field in fields(fsdp.MixedPrecisionPolicy)}
OUR_FIELDS = {field.name for field in fields(fullshard.MixedPrecisionPolicy)}


@on_ranks(2)
@pytest.mark.skipif(
    bool(THEIR_FIELDS - OUR_FIELDS), reason="PyTorch asks our policies for fields that they lack"
)
def test_replicate_goes_on_being_pytorchs() -> None:
    """PyTorch's ``replicate`` works under the patch, with patched policies and without.

    PyTorch 2.15 copies each field of the policies.
    """
    from torch.distributed._composable.replicate_with_fsdp import ReplicateModule, replicate

    plain = fill(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    plain(batch(dtype=torch.float32)).sum().backward()
    found = []
    with patch_torch():
        for options in ({}, {"mp_policy": fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32)}):
            model: Any = copy.deepcopy(plain)
            model.zero_grad()
            replicate(model[0], **options)
            replicate(model, **options)
            model(batch(dtype=torch.float32)).sum().backward()
            grads = [param.grad.full_tensor() for param in model.parameters()]
            expected = [param.grad for param in plain.parameters()]
            found.append(isinstance(model, ReplicateModule))
            found.append(all(map(torch.allclose, grads, expected)))
    assert found == [True] * 4


def fails_alone() -> str:
    """Return the error of this rank if rank 1 fails before it gathers the second block."""
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")  # the fault makes the group unusable
    model = make()
    with pytest.MonkeyPatch.context() as patched, patch_torch():
        patched.setenv("FULLSHARD_PATIENCE_S", "1")
        shard(model, mesh)
        step(model, optimizer_of(model))
        if dist.get_rank() == 1:
            error = RuntimeError("alone")
            patched.setattr(model.blocks[0], "forward", mock.Mock(side_effect=error))
        try:
            step(model, optimizer_of(model))
        except Exception as found:
            return f"{type(found).__name__}: {found}"
    return ""


def test_a_fault_ends_waits_for_the_public_functions(pool: RankPool) -> None:
    """A fault ends the waits of other ranks; Gloo alone would wait for half an hour."""
    waiting, failed = pool.run(2, fails_alone, timeout_s=90)
    assert failed == "RuntimeError: alone"
    assert waiting.startswith("PeerError") and "rank 1" in waiting
