"""State dicts of the flat interface with other wrappers, optimizers and readers."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from fullshard import (
    FullOptimStateDictConfig,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
)
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.compat import patch_torch
from fullshard.errors import ConfigError, ProtocolError
from tests.kit.flat import originals, step, wrap
from tests.ranks.net import Net, batch, make
from tests.ranks.pool import on_ranks

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
EXACT = 1e-12


def wrapped(original: bool, plain: Net | None = None, **options: Any) -> Any:
    model = copy.deepcopy(plain) if plain is not None else make()
    return wrap(model, use_orig_params=original, **options)


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def same_weights(model: Any, plain: nn.Module) -> None:
    with FSDP.state_dict_type(model, FULL):
        state = model.state_dict()
    for name, value in plain.state_dict().items():
        assert (state[name] - value).abs().max() < EXACT, name


def same_state(ours: dict[str, Any], plain: nn.Module, theirs: torch.optim.Optimizer) -> None:
    """Check that ``ours``, keyed by name, equals the state of the optimizer of ``plain``."""
    name_of = {id(param): name for name, param in plain.named_parameters()}
    assert set(ours) == {name_of[id(param)] for param in theirs.state}
    for param, kept in theirs.state.items():
        for key, value in kept.items():
            got = whole(ours[name_of[id(param)]][key])
            assert got.shape == value.shape
            assert (got - value).abs().max() < EXACT, (name_of[id(param)], key)


def checkpointed(original: bool, when: str) -> Any:
    """Wrap a model with ours and, before or after that, with activation checkpoints."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )

    model: Any = make()
    if when == "before":
        model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    for i, block in enumerate(model.blocks):
        model.blocks[i] = FSDP(block, use_orig_params=original)
    if when == "before":
        model = checkpoint_wrapper(model)
    model = FSDP(model, use_orig_params=original)
    if when == "after":
        is_linear = lambda module: isinstance(module, nn.Linear)  # noqa: E731
        apply_activation_checkpointing(model, check_fn=is_linear)
    return model


@on_ranks(2)
@originals
def test_wrappers_of_activation_checkpoints_are_seen_through(original: bool) -> None:
    plain = make()
    with torch.no_grad():
        for param in plain.parameters():
            param.add_(1)
    for kind in (FULL, SHARDED):
        for source in ("never", "before", "after"):
            saving = checkpointed(original, source)
            saving.load_state_dict(plain.state_dict())
            same_weights(saving, plain)
            with FSDP.state_dict_type(saving, kind):
                state = saving.state_dict()
            assert list(state) == list(plain.state_dict())
            for target in ("never", "before", "after"):
                loading = checkpointed(not original, target)
                with FSDP.state_dict_type(loading, kind):
                    loading.load_state_dict(state)
                same_weights(loading, plain)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (saving, plain)]
    for one, optimizer in zip((saving, plain), optimizers, strict=True):
        step(one, optimizer)
    same_weights(saving, plain)


def pair(original: bool, *, is_reversed: bool = False) -> tuple[Any, Any, Net, Any]:
    """Return a wrapped and a plain model after the same two steps, with their optimizers."""
    plain = make()
    model = wrapped(original, plain)
    params = list(model.parameters())
    ours = torch.optim.AdamW(params[::-1] if is_reversed else params, lr=1e-2)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for number in range(2):
        step(model, ours, number)
        step(plain, theirs, number)
    return model, ours, plain, theirs


@on_ranks(2, 3)
@originals
def test_optimizers_of_ranks_may_have_other_orders(original: bool) -> None:
    """Ranks may give their optimizers the parameters in different orders."""
    model, ours, plain, theirs = pair(original, is_reversed=dist.get_rank() % 2 == 1)
    config = FullOptimStateDictConfig(rank0_only=True)
    for kind, how in ((FULL, None), (FULL, config), (SHARDED, None)):
        with FSDP.state_dict_type(model, kind, None, how):
            state = FSDP.optim_state_dict(model, ours)
            if how is None or dist.get_rank() == 0:
                same_state(state["state"], plain, theirs)
            loaded = FSDP.optim_state_dict_to_load(model, ours, state)
        own = ours.state_dict()
        assert loaded["state"].keys() == own["state"].keys()
        for number, kept in own["state"].items():
            for key, value in kept.items():
                assert torch.equal(loaded["state"][number][key], value), (number, key)
    same_weights(model, plain)


@on_ranks(3)
def test_ranks_without_the_same_parameters_are_told() -> None:
    """An optimizer that lacks a parameter on one rank is refused on all before any gather."""
    plain = make()
    model = wrapped(True, plain)
    params = list(model.parameters())
    last = dist.get_rank() == dist.get_world_size() - 1
    optimizer = torch.optim.AdamW(params[:-1] if last else params, lr=1e-2)
    step(model, optimizer)
    for kind in (FULL, SHARDED):
        with FSDP.state_dict_type(model, kind):
            with pytest.raises(ConfigError, match="ranks have different optimizer state") as raised:
                FSDP.optim_state_dict(model, optimizer)
            assert isinstance(raised.value, RuntimeError)
            assert "rank 2 lacks step of head.bias, exp_avg of head.bias" in str(raised.value)
    everywhere = torch.optim.AdamW(params, lr=1e-2)
    step(model, everywhere)
    state = FSDP.full_optim_state_dict(model, everywhere)
    with pytest.raises(ConfigError, match="ranks have different optimizer state"):
        FSDP.scatter_full_optim_state_dict(state, model, optim=optimizer)
    FSDP.scatter_full_optim_state_dict(state, model, optim=everywhere)


@on_ranks(2)
@originals
def test_parameters_may_be_given_instead_of_their_optimizer(original: bool) -> None:
    """Older calls may get ``optim_input``, or nothing, in place of the optimizer."""
    model, ours, plain, _ = pair(original)
    full = FSDP.full_optim_state_dict(model, ours, rank0_only=False)
    params = list(model.parameters())
    groups = [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.5}]
    for given in (params, groups):
        with pytest.warns(FutureWarning, match="`optim_input` argument is deprecated"):
            loaded = FSDP.shard_full_optim_state_dict(full, model, optim_input=given)
        with pytest.warns(FutureWarning, match="`optim_input` argument is deprecated"):
            scattered = FSDP.scatter_full_optim_state_dict(full, model, optim_input=given)
        assert len(loaded["param_groups"]) == (1 if given is params else 2)
        for one in (loaded, scattered):
            for number, kept in ours.state_dict()["state"].items():
                for key, value in kept.items():
                    assert torch.equal(one["state"][number][key], value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        neither = FSDP.shard_full_optim_state_dict(full, model)
    assert neither["state"].keys() == ours.state_dict()["state"].keys()
    backwards = list(plain.parameters())[::-1]
    with pytest.warns(FutureWarning, match="deprecated"):
        by_id = FSDP.rekey_optim_state_dict(
            full, OptimStateKeyType.PARAM_ID, plain, optim_input=backwards
        )
    other = torch.optim.AdamW(backwards, lr=1e-2)
    other.load_state_dict(by_id)
    same_state(full["state"], plain, other)


@on_ranks(2)
@originals
def test_forms_of_optimizers_state(original: bool) -> None:
    """Optimizer state may be keyed by name, lack groups, or have values other than tensors."""

    model, ours, plain, theirs = pair(original)
    params = list(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of PyTorch's _NamedOptimizer
        from torch.distributed.optim import _NamedOptimizer

        named = _NamedOptimizer(
            model.named_parameters(), torch.optim.AdamW, [{"params": params}], model, lr=1e-2
        )
    for param in params:
        param.grad = torch.zeros_like(param)
    named.step()  # it loads only into existing state
    state = FSDP.full_optim_state_dict(model, ours, rank0_only=False)
    FSDP.optim_state_dict_to_load(model, named, state, is_named_optimizer=True, load_directly=True)
    assert all(isinstance(key, str) for key in named.state_dict()["state"])
    same_state(FSDP.optim_state_dict(model, named)["state"], plain, theirs)

    own = copy.deepcopy(ours.state_dict())
    for kept in own["state"].values():
        kept.update(given=2.5, absent=None)
    del own["param_groups"]
    made = FSDP.optim_state_dict(model, ours, own)
    assert set(made) == {"state"}
    loaded = FSDP.optim_state_dict_to_load(model, ours, made)
    assert {kept["given"] for kept in loaded["state"].values()} == {2.5}
    assert {kept["absent"] for kept in loaded["state"].values()} == {None}
    assert loaded["param_groups"] == ours.state_dict()["param_groups"]
    if not original:
        del made["state"]["head.bias"]  # one of several parameters in a flat parameter
        with pytest.raises(ConfigError, match=r"'step' differs between .*, or some have none"):
            FSDP.optim_state_dict_to_load(model, ours, made)


@on_ranks(2)
@originals
def test_what_is_not_sharded_is_not_copied(original: bool) -> None:
    """Buffers and ignored parameters are not copied in full or sharded state dicts."""
    plain = make()
    plain.register_buffer("count", torch.zeros(3))
    model = FSDP(plain, use_orig_params=original, ignored_modules=[plain.head])
    own = [model.module.count, model.module.head.weight, model.module.head.bias]
    for kind in (FULL, SHARDED):
        with FSDP.state_dict_type(model, kind):
            state = model.state_dict(prefix="a.")
        found = [state["a.count"], state["a.head.weight"], state["a.head.bias"]]
        assert [one.data_ptr() for one in found] == [one.data_ptr() for one in own]
    settings = FSDP.set_state_dict_type(model, SHARDED)
    assert settings is not None
    assert settings.state_dict_type is FULL
    settings = FSDP.get_state_dict_type(model)
    assert settings is not None
    assert settings.state_dict_config._use_dtensor  # type: ignore[attr-defined]
    assert settings.optim_state_dict_config._use_dtensor  # type: ignore[attr-defined]


@on_ranks(2)
@originals
def test_summoning_is_refused_while_running_and_edits_stay_where_nothing_is_sharded(
    original: bool,
) -> None:
    model = wrapped(original)
    seen: list[AssertionError] = []

    def summon(*_: Any) -> None:
        try:
            with FSDP.summon_full_params(model):
                pass
        except AssertionError as error:
            seen.append(error)

    hook = model.module.head.register_forward_pre_hook(summon)
    output = model(batch())
    output.register_hook(summon)
    output.sum().backward()
    hook.remove()
    assert len(seen) == 2
    for error in seen:
        assert isinstance(error, ProtocolError)
        assert "manually unshard parameters during forward" in str(error)
    with FSDP.summon_full_params(model):  # the wrapper is still usable
        pass

    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        model = wrapped(original, sharding_strategy=strategy)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        stays = int(strategy is ShardingStrategy.NO_SHARD)
        for options in ({}, {"rank0_only": True}):
            with FSDP.summon_full_params(model, writeback=False, **options), torch.no_grad():
                if not options or dist.get_rank() == 0:
                    model.module.head.bias.add_(1)
            assert torch.equal(model.state_dict()["head.bias"], before["head.bias"] + stays)


@on_ranks(2)
def test_dtensors_are_synchronized() -> None:
    """DTensor parameters and buffers get the first rank's values too."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))

    def placed(seed: int) -> DTensor:
        values = torch.full((4, 3), float(seed), dtype=torch.float64)
        return DTensor.from_local(values, mesh["tp"], [Replicate()], run_check=False)

    inner = nn.Module()
    inner.weight = nn.Parameter(placed(dist.get_rank()))
    inner.register_buffer("buffer", placed(dist.get_rank() + 5))
    inner.forward = lambda x: x  # type: ignore[method-assign, assignment]
    model = FSDP(inner, device_mesh=mesh["dp"], sync_module_states=True)
    assert torch.equal(inner.buffer.to_local(), torch.full((4, 3), 5.0).double())
    with FSDP.summon_full_params(model):
        assert not whole(inner.weight.detach()).any()


@on_ranks(2)
@originals
def test_pytorchs_state_dict_functions_know_our_wrapper(original: bool) -> None:
    """PyTorch's state dict functions read and write our wrapper while PyTorch is patched."""
    with patch_torch():
        from torch.distributed.checkpoint import state_dict as reader

        for full, sends, spread in (
            (False, False, False),
            (True, False, True),
            (True, True, False),
        ):
            model, ours, plain, theirs = pair(original)
            options = reader.StateDictOptions(full_state_dict=full)
            weights, state = reader.get_state_dict(model, ours, options=options)
            assert list(weights) == list(plain.state_dict())
            for name, value in plain.state_dict().items():
                assert isinstance(weights[name], DTensor) is not full
                assert (whole(weights[name]) - value).abs().max() < EXACT
            same_state(state["state"], plain, theirs)
            if sends and dist.get_rank() > 0:
                weights, state = {}, {}
            options = reader.StateDictOptions(full_state_dict=full, broadcast_from_rank0=sends)
            other = wrapped(not original)
            second = torch.optim.AdamW(other.parameters(), lr=3e-2)
            reader.set_model_state_dict(other, weights, options=options)
            reader.set_optimizer_state_dict(other, second, state, options=options)
            for one, optimizer in ((plain, theirs), (other, second)):
                step(one, optimizer, 7)
            same_weights(other, plain)
            if spread:
                reader._patch_model_state_dict(other, options=options)
                for name, value in plain.state_dict().items():
                    assert (other.state_dict()[name] - value).abs().max() < EXACT
