"""Forwards, generation and state dicts inside ``unshard_params`` or ``summon_full_params``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard, unshard_params
from fullshard.checkpoint import full_state_dict, load_full_state_dict
from fullshard.engine import Engine
from fullshard.errors import BusyError
from fullshard.flat import FullStateDictConfig, MixedPrecision, StateDictType
from tests.kit.checkpoint_files import WAYS, plain
from tests.ranks.models import noise
from tests.ranks.net import batch, make
from tests.ranks.pool import RankPool, on_ranks

PARALLEL = ("tp", "ragged tp")
SHARDED = [way for way in WAYS if way != "plain"]


def lends(model: Any) -> Callable[..., AbstractContextManager[None]]:
    """Return the call that lends the parameters of this kind of model."""
    is_wrapped = isinstance(model, FullyShardedDataParallel)
    return FullyShardedDataParallel.summon_full_params if is_wrapped else unshard_params


def pair(way: str) -> tuple[Any, Any]:
    """Return a model and its unsharded twin after one training step."""
    twin = plain(1)
    model = WAYS[way](copy.deepcopy(twin))
    for one in (model, twin):
        one(noise(4, 192, seed=1)).square().mean().backward()
        torch.optim.SGD(one.parameters(), lr=0.1).step()
        one.zero_grad()
    return model, twin


def trains_on(model: Any, twin: Any) -> None:
    """Check that both models still train alike after a loan."""
    losses = []
    for one in (model, twin):
        one.train()
        loss = one(noise(4, 192, seed=2)).square().mean()
        loss.backward()
        torch.optim.SGD(one.parameters(), lr=0.1).step()
        one.zero_grad()
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) < 1e-12
    alike(full_state_dict(model, rank0_only=False), twin.state_dict())


def of(model: Any, name: str) -> Any:
    """Return a submodule by its unwrapped name."""
    for part in name.split("."):
        model = getattr(model, "_fsdp_wrapped_module", model)
        model = getattr(model, part)
    return model


def equal(one: Tensor, other: Tensor) -> None:
    assert torch.allclose(one, other, rtol=0, atol=1e-12)


def alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        one = found[name].full_tensor() if isinstance(found[name], DTensor) else found[name]
        assert one.dtype == value.dtype, name
        assert torch.allclose(one, value, rtol=0, atol=1e-12), name


@contextmanager
def no_gathers() -> Iterator[None]:
    """Fail if the engine does any work in the block."""

    def refuse(*args: Any) -> None:
        raise AssertionError("something was gathered")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "trigger", refuse)
        yield


def runs(way: str) -> None:
    model, twin = pair(way)
    model.eval(), twin.eval()
    x = noise(4, 192, seed=3)
    takes_part = dist.get_rank() == 0 or way in PARALLEL  # with TP, every rank takes part
    with lends(model)(model), torch.no_grad():
        if takes_part:
            with no_gathers():
                equal(model(x), twin(x))
                equal(of(model, "blocks.1")(x), twin.blocks[1](x))
        for one in (model, twin):
            of(one, "blocks.0.gain").mul_(2)
        if takes_part:
            equal(model(x), twin(x))
    with torch.no_grad():
        equal(model(x), twin(x))
    trains_on(model, twin)


@pytest.mark.parametrize("way", SHARDED)
def test_forwards_run_on_what_is_lent_without_communication(pool: RankPool, way: str) -> None:
    for world in (1, 2, 4) if way in PARALLEL else (1, 2, 3):
        pool.run(world, runs, way)


@on_ranks(2)
@pytest.mark.parametrize("way", SHARDED)
def test_units_that_are_not_lent_gather(way: str) -> None:
    """Units that are not lent gather as usual, beside units that are."""
    model, twin = pair(way)
    x = noise(4, 192, seed=3)
    model.eval(), twin.eval()
    parts = [(model, {"recurse": False}), (of(model, "blocks.1"), {})]
    for part, options in parts:
        with lends(model)(part, **options), torch.no_grad():
            for _ in range(2):
                equal(model(x), twin(x))
                equal(of(model, "blocks.0")(x), twin.blocks[0](x))
                equal(of(model, "blocks.1")(x), twin.blocks[1](x))
        with torch.no_grad():
            equal(model(x), twin(x))
        trains_on(model, twin)
        model.eval(), twin.eval()


def has_states(way: str) -> None:
    model, twin = pair(way)
    with torch.no_grad():
        for one in (model, twin):
            one.norm.running_mean.add_(1)
    takes_part = dist.get_rank() == 0 or way in PARALLEL
    other = plain(5).state_dict()

    def load(state: dict[str, Any]) -> None:
        if way in PARALLEL:  # lent parameters are DTensors
            load_full_state_dict(model, state)
        else:
            assert not model.load_state_dict(state).missing_keys

    for kept in (True, False):
        with lends(model)(model, writeback=kept), torch.no_grad():
            for one in (model, twin):
                of(one, "blocks.0.gain").mul_(2)
            if takes_part:
                with no_gathers():
                    alike(model.state_dict(), twin.state_dict())
                    alike(full_state_dict(model, rank0_only=False), twin.state_dict())
                    before = {name: value.clone() for name, value in twin.state_dict().items()}
                    load(other)
                    alike(model.state_dict(), other)
                    load_full_state_dict(model, before)
                    alike(model.state_dict(), before)
            if kept:
                load(other)
        stays = dist.get_world_size() == 1 and "flat" in way  # as with PyTorch without write-back
        if kept or not stays:
            twin.load_state_dict(other)
        alike(full_state_dict(model, rank0_only=False), twin.state_dict())
    trains_on(model, twin)


@pytest.mark.parametrize("way", SHARDED)
def test_state_dicts_are_those_of_what_is_lent(pool: RankPool, way: str) -> None:
    for world in (1, 2, 4) if way in PARALLEL else (1, 2, 3):
        pool.run(world, has_states, way)


def on_rank_0(way: str) -> None:
    """Do everything on rank 0 alone; on other ranks, calls raise errors."""
    model, twin = pair(way)
    x = noise(4, 192, seed=3)
    model.eval(), twin.eval()
    for offload in (False, True):
        with lends(model)(model, rank0_only=True, offload_to_cpu=offload), torch.no_grad():
            twin.blocks[0].gain.mul_(2)
            if dist.get_rank() == 0:
                of(model, "blocks.0.gain").mul_(2)
                with no_gathers():
                    equal(model(x), twin(x))
                    alike(model.state_dict(), twin.state_dict())
                    model.load_state_dict(twin.state_dict())
            else:
                assert full_state_dict(model, rank0_only=False) == {}
                for call in (lambda: model(x), lambda: model.load_state_dict(twin.state_dict())):
                    with pytest.raises(BusyError, match="to another rank: do this on rank 0 only"):
                        call()
    with (
        lends(model)(of(model, "blocks.1"), rank0_only=True),
        torch.no_grad(),
        pytest.raises(BusyError, match="lend all"),
    ):
        model(x)
    with lends(model)(model, rank0_only=True, recurse=False), torch.no_grad():
        who = "lend all" if dist.get_rank() == 0 else "to another rank"
        with pytest.raises(BusyError, match=who):
            model(x)
        with pytest.raises(BusyError, match="lend all"):
            full_state_dict(model)
    model.reset_iter_state() if hasattr(model, "reset_iter_state") else None
    trains_on(model, twin)


@pytest.mark.parametrize("way", [way for way in SHARDED if way not in PARALLEL])
def test_rank_0_may_do_everything_alone(pool: RankPool, way: str) -> None:
    pool.run(2, on_rank_0, way)
    pool.run(4, on_rank_0, way)


@on_ranks(2)
@pytest.mark.parametrize("way", SHARDED)
def test_a_backward_is_refused_in_the_words_of_the_user(way: str) -> None:
    model, twin = pair(way)
    x = noise(4, 192, seed=3).requires_grad_()
    call = "summon_full_params" if "flat" in way else "unshard_params"
    with lends(model)(model):
        loss = model(x).square().sum()
        with pytest.raises(BusyError, match=rf"{call}\(\) lent to the forward"):
            loss.backward()
        inner = of(model, "blocks.1")(x).square().sum()
        (grad,) = torch.autograd.grad(inner, x)  # reaches no parameter
        (expected,) = torch.autograd.grad(twin.blocks[1](x).square().sum(), x)
        equal(grad, expected)
        late = of(model, "blocks.0")(x).square().sum()
    with pytest.raises(BusyError, match=rf"{call}\(\) lent to the forward"):
        late.backward()
    assert all(param.grad is None for param in model.parameters())
    twin(x)  # for the running statistics
    trains_on(model, twin)


@on_ranks(2)
@pytest.mark.parametrize("face", ["flat", "units"])
def test_nothing_is_cast_inside(face: str) -> None:
    """Lent parameters and all results have the dtype of the shards."""
    twin = make(torch.float32)
    twin.register_buffer("shift", torch.ones(6))
    model: Any = copy.deepcopy(twin)
    if face == "flat":
        precision = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)
        model = FullyShardedDataParallel(model, mixed_precision=precision)
    else:
        policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
        fully_shard(model, mp_policy=policy)
    x = batch(dtype=torch.float32)
    outside = model(x).dtype
    with lends(model)(model), torch.no_grad():
        assert torch.equal(model(x), twin(x))
        assert of(model, "shift").dtype == torch.float32
    assert model(x).dtype == outside != torch.float32


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_kinds_of_state_dicts(use_orig_params: bool) -> None:
    model = WAYS["flat" if use_orig_params else "one flat"](plain(1))
    twin = plain(1)
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    wrapper = FullyShardedDataParallel
    with wrapper.summon_full_params(model):
        with wrapper.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            found = model.state_dict()
            alike(found, twin.state_dict() if dist.get_rank() == 0 else {})
        with (
            wrapper.state_dict_type(model, StateDictType.SHARDED_STATE_DICT),
            pytest.raises(BusyError, match=r"while summon_full_params\(\) lends"),
        ):
            model.state_dict()


@on_ranks(2, timeout_s=120.0)
@pytest.mark.parametrize("face", ["units", "flat"])
def test_text_is_generated_and_weights_are_saved(tmp_path: Path, face: str) -> None:
    """Text generation and saving work inside a loan, as at the end of an epoch."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=65, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    twin = LlamaForCausalLM(config)
    model: Any = copy.deepcopy(twin)
    for at, layer in enumerate(model.model.layers):
        if face == "units":
            fully_shard(layer)
        else:
            model.model.layers[at] = FullyShardedDataParallel(layer)
    model = fully_shard(model) if face == "units" else FullyShardedDataParallel(model)
    prompt = torch.tensor([[3, 1, 4]])
    expected = twin.generate(prompt, max_new_tokens=8, do_sample=False)
    rank = dist.get_rank()
    for rank0_only in (False, True):
        with lends(model)(model, rank0_only=rank0_only, writeback=False):
            if rank == 0 or not rank0_only:  # synced_gpus asks whether other ranks still generate
                options = {"do_sample": False, "synced_gpus": not rank0_only}
                found = model.generate(prompt, max_new_tokens=8, **options)
                assert torch.equal(found, expected)
            if rank == 0:
                model.save_pretrained(tmp_path / f"{face}-{rank0_only}")
        dist.barrier()
        again = AutoModelForCausalLM.from_pretrained(tmp_path / f"{face}-{rank0_only}")
        assert torch.equal(again(prompt).logits, twin(prompt).logits)
    assert torch.equal(model(prompt).logits, twin(prompt).logits)
