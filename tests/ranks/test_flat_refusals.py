"""Errors of the flat interface, which derive from PyTorch's, and its warnings."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard as ours
from fullshard import (
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    errors,
)
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.flat.prepare import warn_of_choice
from fullshard.frontend.meshes import DataMesh
from fullshard.wrap import ModuleWrapPolicy, always_wrap_policy
from tests.kit.flat_differential import BF16, Block, Stack, quiet, wrap
from tests.ranks.pool import RankPool, on_ranks


class Valueless(nn.Module):
    """A module with a parameter, but without ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(2, 2), Valueless())


def _hook_twice() -> None:
    model = FSDP(Block())
    model.register_comm_hook(None, print)
    model.register_comm_hook(None, print)


def _hook_inside() -> None:
    model = wrap(ours, Stack(), "nested")
    model.blocks[0].register_comm_hook(None, print)


def _tied_across() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


def _tied_by_hand() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[0] = FSDP(model[0])
    model[1] = FSDP(model[1])


def _strided() -> None:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.ones(8, 4)[::2])
    FSDP(model)


def _twice_wrapped() -> None:
    FSDP(wrap(ours, Stack(), "nested"), auto_wrap_policy=always_wrap_policy)


def _inner(what: str) -> None:
    model = wrap(ours, Stack(), "nested")
    model.check_is_root()
    if what == "no_sync":
        with model.blocks[0].no_sync():
            pass
    else:
        model.blocks[0].clip_grad_norm_(1.0)


def _in_summon(what: Callable[[Any], object]) -> None:
    model = wrap(ours, Stack(), "nested", use_orig_params=True)
    with FSDP.summon_full_params(model):
        what(model)


def _summon(module: nn.Module) -> None:
    with FSDP.summon_full_params(module):
        pass


def _whole_for_a_piece() -> None:
    model = FSDP(nn.Linear(5, 5), use_orig_params=True)
    model.module.weight = nn.Parameter(torch.ones(6, 6))
    _summon(model)


def _mixed_frozen() -> None:
    model = nn.Linear(3, 3)
    model.bias.requires_grad_(False)
    FSDP(model, use_orig_params=False)


def _summon_in_forward() -> None:
    class Inner(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with FSDP.summon_full_params(self):
                return super().forward(x)

    FSDP(Inner(3, 3))(torch.ones(1, 3))


REFUSALS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "group and mesh": (
        lambda: FSDP(
            Block(), process_group=dist.group.WORLD, device_mesh=init_device_mesh("cpu", (2,))
        ),
        ValueError,
        "process_group and device_mesh",
    ),
    "hybrid without groups": (
        lambda: FSDP(Block(), sharding_strategy=ShardingStrategy.HYBRID_SHARD),
        ValueError,
        "requires explicit specification of process group",
    ),
    "hybrid with one group": (
        lambda: FSDP(
            Block(),
            process_group=dist.group.WORLD,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        ),
        ValueError,
        "Expected process_group to be passed in",
    ),
    "hybrid with groups that cross twice": (
        lambda: FSDP(
            Block(),
            process_group=(dist.group.WORLD, dist.group.WORLD),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        ),
        ValueError,
        "no rank twice",
    ),
    "hybrid on a 1-D mesh": (
        lambda: FSDP(
            Block(),
            device_mesh=init_device_mesh("cpu", (2,)),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        ),
        ValueError,
        "1 dims, expected 2",
    ),
    "unknown device": (lambda: FSDP(Block(), device_id="nowhere"), ValueError, "expected a device"),
    "device that is none": (
        lambda: FSDP(Block(), device_id=1.5),  # type: ignore[arg-type]
        TypeError,
        "expected a device",
    ),
    "ignored module that is none": (
        lambda: FSDP(Block(), ignored_modules=[1]),
        ValueError,
        "expects nn.Module list elements",
    ),
    "ignored modules not in a list": (
        lambda: FSDP(Block(), ignored_modules=1),
        TypeError,
        "iterable",
    ),
    "ignored states of two kinds": (
        lambda: FSDP(Block(), ignored_states=[Block(), nn.Parameter(torch.ones(1))]),
        ValueError,
        "all nn.Parameter or all nn.Module",
    ),
    "both kinds of ignoring": (
        lambda: FSDP(Block(), ignored_states=[Block()], ignored_modules=[Block()]),
        ValueError,
        "Cannot pass both",
    ),
    "init that is no function": (
        lambda: FSDP(Block(), param_init_fn=3),  # type: ignore[arg-type]
        ValueError,
        "to be callable",
    ),
    "meta device without values": (
        lambda: FSDP(_on_meta()),
        ValueError,
        "Valueless has no reset_parameters()",
    ),
    "a policy over units": (_twice_wrapped, ValueError, "not already have FSDP applied"),
    "tied over units": (_tied_across, ValueError, "tied"),
    "tied over units by hand": (_tied_by_hand, ValueError, "tied"),
    "gaps in memory": (_strided, NotImplementedError, "not contiguous"),
    "frozen and trainable in one": (_mixed_frozen, ValueError, "frozen"),
    "hook that is no function": (
        lambda: FSDP(Block()).register_comm_hook(None, 3),  # type: ignore[arg-type]
        ValueError,
        "must be callable",
    ),
    "two hooks": (_hook_twice, AssertionError, "already registered"),
    "hook of an inner unit": (_hook_inside, AssertionError, "root"),
    "no_sync of an inner unit": (lambda: _inner("no_sync"), RuntimeError, "root"),
    "clipping an inner unit": (lambda: _inner("clip"), RuntimeError, "root"),
    "clipping inside of summon": (
        lambda: _in_summon(lambda model: model.clip_grad_norm_(1.0)),
        ValueError,
        "lends the full parameters",
    ),
    "apply inside of summon": (
        lambda: _in_summon(lambda model: model.apply(print)),
        ValueError,
        "expected to be in states",
    ),
    "summon inside of summon": (
        lambda: _in_summon(_summon),
        AssertionError,
        "summon_full_params() while summon_full_params() lends",
    ),
    "summon inside of summon, as told before": (
        lambda: _in_summon(lambda model: _summon(FSDP.fsdp_modules(model)[1])),
        errors.BusyError,
        "lends the full parameters",
    ),
    "summon inside of a forward": (_summon_in_forward, RuntimeError, "in the middle of a forward"),
    "a whole parameter in place of a piece": (
        _whole_for_a_piece,
        RuntimeError,
        "Cannot writeback",
    ),
    "unknown strategy": (
        lambda: FSDP(Block(), sharding_strategy="FULL"),  # type: ignore[arg-type]
        ValueError,
        "expected a ShardingStrategy",
    ),
    "unknown precision": (
        lambda: FSDP(Block(), mixed_precision=BF16),  # type: ignore[arg-type]
        TypeError,
        "expected a MixedPrecision",
    ),
    "unknown offload": (
        lambda: FSDP(Block(), cpu_offload=True),  # type: ignore[arg-type]
        TypeError,
        "expected a CPUOffload",
    ),
}


@on_ranks(2)
def test_what_cannot_work_is_refused() -> None:
    """Misuse raises errors that derive from PyTorch's and say what is wrong."""
    wrong = {}
    for name, (act, kind, words) in REFUSALS.items():
        try:
            with quiet():
                act()
            wrong[name] = "nothing was raised"
        except errors.FullshardError as error:
            if not isinstance(error, kind) or words not in str(error):
                wrong[name] = f"{type(error).__mro__}: {error}"
    assert wrong == {}


@on_ranks(2)
def test_warns_of_what_is_of_no_use() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FSDP(nn.ModuleList([nn.Linear(2, 2)]))
        module = nn.Linear(2, 2)
        FSDP(module, ignored_modules=[module])
        FSDP(
            nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            mixed_precision=MixedPrecision(BF16),
        )
    container, ignored, exempt = [str(one.message) for one in caught]
    assert "ModuleList" in container and "all parameters being ignored" in ignored
    assert "BatchNorm1d" in exempt


def warned_of_choices() -> list[list[str]]:
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    full = FullStateDictConfig(offload_to_cpu=True)
    model = FSDP(nn.Linear(2, 2), use_orig_params=True)
    on_cuda = cast(DataMesh, SimpleNamespace(mesh=SimpleNamespace(device_type="cuda"), shard_dim=0))
    strategy = ShardingStrategy.FULL_SHARD

    def settings() -> None:
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            pass

    def full_state() -> None:
        FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, full)
        model.state_dict()

    def summon(**options: Any) -> None:
        with FSDP.summon_full_params(model, writeback=False, **options):
            pass

    acts: list[Callable[[], object]] = [
        lambda: FSDP(nn.Linear(2, 2), process_group=alone),
        lambda: FSDP(nn.Sequential(nn.Linear(2, 2)), alone, auto_wrap_policy=always_wrap_policy),
        lambda: FSDP(nn.Linear(2, 2), alone, sharding_strategy=ShardingStrategy.NO_SHARD),
        settings,
        full_state,
        lambda: summon(offload_to_cpu=True),
        lambda: summon(offload_to_cpu=True, rank0_only=True),
        lambda: warn_of_choice(model, strategy, on_cuda, None),
        lambda: warn_of_choice(model, strategy, on_cuda, torch.device("cuda", 0)),
    ]
    found = []
    for act in acts:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            act()
        found.append([f"{one.category.__name__} {one.message}"[:76] for one in caught])
    return found


def clipped_without_gradients() -> tuple[list[str], float, torch.dtype]:
    model = FSDP(nn.Linear(2, 2))
    norm: list[Tensor] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        norm.append(model.clip_grad_norm_(1.0))
        model(torch.ones(1, 2)).sum().backward()
        model.clip_grad_norm_(1.0)
    return [str(one.message) for one in caught], norm[0].item(), norm[0].dtype


def test_warns_of_a_norm_without_gradients(pool: RankPool) -> None:
    for rank, (said, norm, dtype) in enumerate(pool.run(2, clipped_without_gradients)):
        assert len(said) == 1 and f"on rank {rank}: no parameter has a gradient" in said[0]
        assert (norm, dtype) == (0.0, torch.float32)


def test_warns_of_choices_as_pytorch_does(pool: RankPool) -> None:
    alone = "UserWarning FullyShardedDataParallel: one rank holds all of "
    types = "FutureWarning FullyShardedDataParallel.state_dict_type() and set_state_dict_"
    copies = "(offload_to_cpu=True) without rank0_only=True"
    for found in pool.run(2, warned_of_choices):
        kinds = [[one[: len(alone)] for one in some] for some in found[:3]]
        assert kinds == [[alone], [alone], []]
        assert found[3] == [types] and found[4][0] == types
        assert copies in found[4][1] and len(found[4]) == 2
        assert len(found[5]) == 1 and copies in found[5][0] and found[6] == []
        assert len(found[7]) == 1 and "is on the CPU" in found[7][0] and found[8] == []


def nothing_to_summon() -> list[list[int]]:
    """Return the sizes of parameters lent above wrappers, without ``recurse`` and with it."""
    inner = FSDP(nn.Linear(4, 4), use_orig_params=True)
    sizes = []
    for module, recurse in ((nn.Sequential(inner), False), (nn.Sequential(inner), True)):
        with FSDP.summon_full_params(module, recurse=recurse):
            sizes.append([param.numel() for param in inner.parameters()])
    return sizes


def test_a_module_above_wrappers_summons_nothing_itself(pool: RankPool) -> None:
    one, other = pool.run(2, nothing_to_summon)
    assert one[1] == other[1] == [16, 4]
    assert [a + b for a, b in zip(one[0], other[0], strict=True)] == [16, 4]


@on_ranks(4)
def test_a_hook_is_refused_on_copies_that_are_shared() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    model = FSDP(Block(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    with pytest.raises(AssertionError, match="hybrid"):
        model.register_comm_hook(None, print)


@on_ranks(3)
def test_ties_are_refused_before_anything_is_sent() -> None:
    """A tie is refused before the broadcast: rank 0 would send more elements than others expect."""
    model = nn.Sequential(nn.Linear(5, 2), nn.Linear(5, 2))
    model[1].weight = model[0].weight
    FSDP(model[0])
    with pytest.raises(errors.ConfigError, match="is tied to"):
        FSDP(model[1], sync_module_states=True)
    total = torch.tensor(1.0)
    dist.all_reduce(total)
    assert total.item() == 3.0
