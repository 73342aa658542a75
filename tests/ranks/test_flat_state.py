"""State dicts of the flat interface, of models and of optimizers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.errors import ConfigError, ProtocolError, UnsupportedError
from fullshard.frontend.sharded import is_taken_as_it_is
from tests.kit.flat import originals, step
from tests.ranks.net import make
from tests.ranks.pool import RankPool, on_ranks

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
EXACT = 1e-12


class Norm(nn.Module):
    """``Net`` with a norm that has buffers, and a head tied to ``net.head``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make()
        self.norm = nn.BatchNorm1d(5).double()
        self.again = nn.Linear(7, 5, bias=False).double()
        self.again.weight = self.net.head.weight
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.net(x)))


def wrapped(original: bool, plain: nn.Module | None = None, **options: Any) -> FSDP:
    model: Any = copy.deepcopy(plain) if plain is not None else Norm()
    blocks = model.net.blocks
    for i, block in enumerate(blocks):
        blocks[i] = FSDP(block, use_orig_params=original, **options)
    return FSDP(model, use_orig_params=original, **options)


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert (ours[name] - value).abs().max() < EXACT, name


@on_ranks(1, 2, 3)
@originals
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_full_dicts(original: bool, strategy: str) -> None:
    plain = Norm()
    options = {"sharding_strategy": ShardingStrategy[strategy]}
    model = wrapped(original, plain, **options)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (plain, model)]
    for one, optimizer in zip((plain, model), optimizers, strict=True):
        step(one, optimizer)
    state = model.state_dict()
    same(state, plain.state_dict())
    kept = {name: value.clone() for name, value in state.items()}
    step(model, optimizers[1])
    # As with PyTorch, parameters are copies, and buffers are the model's own.
    own = dict(model.module.named_buffers())
    for name, value in kept.items():
        assert torch.equal(state[name], own.get(name, value)), name
    assert state["norm.running_mean"].data_ptr() == own["norm.running_mean"].data_ptr()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    plain.load_state_dict(state)

    other = wrapped(not original, None, **options)
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    same(other.state_dict(), plain.state_dict())
    parent = nn.ModuleDict({"inside": other})  # without a wrapper of its own
    prefixed = {f"inside.{name}": value + 1 for name, value in state.items()}
    parent.load_state_dict(prefixed)
    same(parent.state_dict(), prefixed)
    assert torch.equal(other.module.norm.running_mean, state["norm.running_mean"] + 1)

    with FSDP.state_dict_type(
        model, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    ):
        some = model.state_dict()
    assert bool(some) is (torch.distributed.get_rank() == 0)

    plain2 = Norm()
    plain2.load_state_dict(state)
    left = {name: value for name, value in state.items() if name != "net.scale"}
    with pytest.raises(RuntimeError, match=r"net\.scale"):
        other.load_state_dict(left)
    keys = other.load_state_dict({**left, "more": torch.ones(1)}, strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (["net.scale"], ["more"])
    with pytest.raises(RuntimeError, match=r"net\.scale: got \(3,\), expected \(6,\)"):
        other.load_state_dict({**state, "net.scale": torch.ones(3)})


@on_ranks(2, 3)
@originals
def test_sharded_dicts(original: bool) -> None:
    plain = Norm()
    model = wrapped(original, plain)
    with FSDP.state_dict_type(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=True)):
        state = model.state_dict()
        for name, value in plain.state_dict().items():
            if isinstance(state[name], DTensor):
                assert torch.equal(state[name].full_tensor(), value), name
                assert str(state[name].placements) == "(Shard(dim=0),)"
            else:
                assert torch.equal(state[name], value)
        assert sum(isinstance(value, DTensor) for value in state.values()) == 12
    other = wrapped(not original)
    with torch.no_grad(), FSDP.summon_full_params(other):
        for param in other.parameters():
            param.zero_()
    FSDP.set_state_dict_type(other, SHARDED)
    other.load_state_dict(state)
    FSDP.set_state_dict_type(other, FULL)
    same(other.state_dict(), plain.state_dict())


def optimizers(original: bool, kind: str) -> None:
    plain = Norm()
    model = wrapped(original, plain)
    ours, theirs = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, plain))
    for number in range(2):
        step(model, ours, number)
        step(plain, theirs, number)
    names = [name for name, _ in plain.named_parameters()]
    FSDP.set_state_dict_type(model, StateDictType[kind])
    state = FSDP.optim_state_dict(model, ours)
    assert sorted(state["state"]) == sorted(names)
    for number, kept in theirs.state_dict()["state"].items():
        found = state["state"][names[number]]
        for key, value in kept.items():
            got = found[key].full_tensor() if isinstance(found[key], DTensor) else found[key]
            assert got.shape == value.shape
            assert (got - value).abs().max() < EXACT, (names[number], key)
    assert sorted(state["param_groups"][0]["params"]) == sorted(names)

    # Load into a wrapper with the other ``use_orig_params``, which has not stepped.
    weights = model.state_dict()
    other = wrapped(not original)
    FSDP.set_state_dict_type(other, StateDictType[kind])
    other.load_state_dict(weights)
    second = torch.optim.AdamW(other.parameters(), lr=3e-2)
    second.load_state_dict(FSDP.optim_state_dict_to_load(other, second, state))
    assert second.param_groups[0]["lr"] == 1e-2
    for one, optimizer in ((model, ours), (plain, theirs), (other, second)):
        step(one, optimizer, 5)
    for one in (model, other):
        FSDP.set_state_dict_type(one, FULL)
        same(one.state_dict(), plain.state_dict())


@pytest.mark.parametrize("world", [1, 2, 3])
@originals
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_optimizer_state(pool: RankPool, world: int, original: bool, kind: str) -> None:
    pool.run(world, optimizers, original, kind)


@on_ranks(2)
@originals
def test_older_calls(original: bool) -> None:
    plain = Norm()
    model = wrapped(original, plain)
    ours, theirs = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, plain))
    step(model, ours)
    step(plain, theirs)
    first = torch.distributed.get_rank() == 0
    full = FSDP.full_optim_state_dict(model, ours)
    assert bool(full) is first
    scattered = FSDP.scatter_full_optim_state_dict(full, model, optim=ours)
    everywhere = FSDP.full_optim_state_dict(model, ours, rank0_only=False)
    sharded = FSDP.sharded_optim_state_dict(model, ours)
    loaded = [
        scattered,
        FSDP.shard_full_optim_state_dict(everywhere, model, optim=ours),
        FSDP.flatten_sharded_optim_state_dict(sharded, model, ours),
    ]
    own = ours.state_dict()
    for one in loaded:
        assert one["state"].keys() == own["state"].keys()
        for number, kept in own["state"].items():
            for key, value in kept.items():
                assert torch.equal(one["state"][number][key].cpu(), value), key
    by_id = FSDP.rekey_optim_state_dict(everywhere, OptimStateKeyType.PARAM_ID, plain, optim=theirs)
    theirs.load_state_dict(by_id)
    back = FSDP.rekey_optim_state_dict(by_id, OptimStateKeyType.PARAM_NAME, plain, optim=theirs)
    assert back["state"].keys() == everywhere["state"].keys()
    if original:  # a flat parameter has no name in the unwrapped model
        named = FSDP.optim_state_dict_to_load(model, ours, everywhere, is_named_optimizer=True)
        assert named["state"].keys() == dict(model.named_parameters()).keys()
    config = FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, FULL, None, config):
        mine = FSDP.optim_state_dict(model, ours)
        assert bool(mine) is first
        FSDP.optim_state_dict_to_load(model, ours, mine if first else {}, load_directly=True)
    step(model, ours, 1)
    step(plain, theirs, 1)
    same(model.state_dict(), plain.state_dict())


@on_ranks(2)
def test_the_kind_of_state_dicts() -> None:
    model = wrapped(True)
    with pytest.raises(ProtocolError, match="Expected state_dict_config of type"):
        FSDP.set_state_dict_type(model, SHARDED, FullStateDictConfig())
    with pytest.raises(UnsupportedError, match="SHARDED_STATE_DICT"):
        FSDP.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    theirs = torch.distributed.fsdp.StateDictType.SHARDED_STATE_DICT
    before = FSDP.set_state_dict_type(model, theirs)
    assert before is not None and before.state_dict_type is FULL
    with pytest.raises(KeyError), FSDP.state_dict_type(model, FULL):
        raise KeyError  # defect 10 of PyTorch's FSDP1: the kind stays changed
    assert FSDP.get_state_dict_type(model).state_dict_type is SHARDED
    FSDP.set_state_dict_type(model.module.net.blocks[0], FULL)
    with pytest.raises(AssertionError, match="same state dict settings"):
        FSDP.get_state_dict_type(model)
    FSDP.set_state_dict_type(model.module.net.blocks[0], SHARDED)
    assert FSDP.get_state_dict_type(nn.Linear(2, 2)) is None
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    FSDP.set_state_dict_type(model, FULL)
    state = FSDP.optim_state_dict(model, optimizer)
    given = state if torch.distributed.get_rank() == 0 else {}
    with pytest.raises(ConfigError, match='a dictionary without "state"'):  # on all ranks
        FSDP.optim_state_dict_to_load(model, optimizer, given)
    FSDP.optim_state_dict_to_load(model, optimizer, state)


@on_ranks(2)
@originals
def test_dicts_are_those_of_pytorchs_wrapper(original: bool) -> None:
    """PyTorch's wrapper loads state dicts of ours, and the other way round."""
    import warnings

    from torch.distributed import fsdp

    warnings.simplefilter("ignore")
    plain = Norm()
    cpu = torch.device("cpu")
    theirs: Any = copy.deepcopy(plain)
    theirs.net.blocks[0] = fsdp.FullyShardedDataParallel(
        theirs.net.blocks[0], device_id=cpu, use_orig_params=True
    )
    theirs = fsdp.FullyShardedDataParallel(theirs, device_id=cpu, use_orig_params=True)
    ours = wrapped(original, plain)
    pairs = [(one, torch.optim.AdamW(one.parameters(), lr=1e-2)) for one in (theirs, ours)]
    for one, optimizer in pairs:
        step(one, optimizer)
    (_, their_optimizer), (_, our_optimizer) = pairs
    torchs = fsdp.FullyShardedDataParallel
    # With CPU offload from a CPU, PyTorch's states of a parameter share one buffer.
    torchs.set_state_dict_type(
        theirs,
        fsdp.StateDictType.FULL_STATE_DICT,
        fsdp.FullStateDictConfig(),
        fsdp.FullOptimStateDictConfig(offload_to_cpu=False),
    )
    same(ours.state_dict(), theirs.state_dict())
    states = [
        torchs.optim_state_dict(theirs, their_optimizer),
        FSDP.optim_state_dict(ours, our_optimizer),
    ]
    assert states[0]["state"].keys() == states[1]["state"].keys()
    for name, kept in states[0]["state"].items():
        assert kept.keys() == states[1]["state"][name].keys()
        for key, value in kept.items():
            got = states[1]["state"][name][key]
            assert (value - got).abs().max() < EXACT, (name, key, value, got)
    # each loads the other's
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    their_optimizer.load_state_dict(
        torchs.optim_state_dict_to_load(theirs, their_optimizer, states[1])
    )
    our_optimizer.load_state_dict(FSDP.optim_state_dict_to_load(ours, our_optimizer, states[0]))
    for one, optimizer in pairs:
        step(one, optimizer, 3)
    same(ours.state_dict(), theirs.state_dict())


def raise_ill(module: nn.Module, *_: Any) -> None:
    if not is_taken_as_it_is():  # after the wrapper has loaded everything inside
        raise RuntimeError("ill")


@on_ranks(2)
@pytest.mark.parametrize("by_parent", [False, True])
@originals
def test_an_inner_wrapper_loads_after_a_load_that_raised(original: bool, by_parent: bool) -> None:
    inner = FSDP(nn.Linear(4, 4), use_orig_params=original)
    outer = FSDP(nn.Sequential(nn.Tanh(), inner), use_orig_params=original)
    outer.module[0].register_load_state_dict_post_hook(raise_ill)
    model = nn.ModuleList([outer]) if by_parent else outer
    with pytest.raises(RuntimeError, match="ill"):
        model.load_state_dict(model.state_dict())
    inner.load_state_dict({"weight": torch.full((4, 4), 2.0), "bias": torch.full((4,), 2.0)})
    assert sum(value.sum().item() for value in inner.state_dict().values()) == 40.0
