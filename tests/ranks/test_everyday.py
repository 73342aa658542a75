"""Uses of a sharded model other than plain training, beside the unsharded model."""

from __future__ import annotations

import copy
import time
import warnings
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fullshard
from fullshard.errors import ConfigError
from fullshard.schedule import Transcript
from tests.ranks.autograd import engine_of
from tests.ranks.models import fill, full_parameters, noise, shard_units
from tests.ranks.net import apart, batch, make, optimizer_of, shard, step, train_both
from tests.ranks.pool import RankPool, on_ranks


def units(model: Any) -> dict[str, int]:
    return {unit.name: unit.key for unit in engine_of(model).units}


# prefetch


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def deep(reshard: bool = True) -> Any:
    model = fill(Deep().double())
    for part in (model.embed, *model.blocks):
        fullshard.fully_shard(part, reshard_after_forward=reshard)
    return fullshard.fully_shard(model)


def actions_of(model: Any, ids: Tensor) -> list[str]:
    transcript = Transcript()
    engine_of(model).recorder = transcript
    model(ids).sum().backward()
    engine_of(model).recorder = None
    return [str(action) for action in transcript.actions()]


@on_ranks(2, 3)
def test_modules_are_gathered_in_the_order_one_tells() -> None:
    ids = torch.arange(8) % 11
    plain = fill(Deep().double())
    model = deep()
    blocks = model.blocks
    key = units(model)
    names = [key[f"blocks.{i}"] for i in range(4)]
    blocks[0].set_modules_to_forward_prefetch([blocks[2], blocks[3]])
    blocks[3].set_modules_to_backward_prefetch([blocks[1], blocks[0]])
    for _ in range(2):  # the given order also replaces the order recorded in the first step
        actions = actions_of(model, ids)
        at = [i for i, text in enumerate(actions) if text == f"wait {names[0]}"]
        assert actions[at[0] + 1 : at[0] + 3] == [f"unshard {names[2]}", f"unshard {names[3]}"]
        at = [i for i, text in enumerate(actions) if text == f"wait {names[3]}"]
        assert actions[at[1] + 1 : at[1] + 3] == [f"unshard {names[1]}", f"unshard {names[0]}"]
        plain(ids).sum().backward()
        for name, param in model.named_parameters():
            assert torch.allclose(param.grad.full_tensor(), plain.get_parameter(name).grad)
    blocks[0].set_modules_to_forward_prefetch([])
    blocks[3].set_modules_to_backward_prefetch([])
    actions = actions_of(model, ids)
    assert actions[actions.index(f"wait {names[0]}") + 1] == f"unshard {names[1]}"
    for wrong in (nn.Linear(2, 2), 3, deep()):
        with pytest.raises(ConfigError, match="set_modules_to_forward_prefetch: "):
            blocks[0].set_modules_to_forward_prefetch([blocks[1], wrong])


@on_ranks(2)
def test_prefetched_in_vain() -> None:
    """Prefetched units that do not run are resharded; the given order survives a later root."""
    ids = torch.arange(8) % 11
    model = fill(Deep().double())
    inner = nn.Sequential(*model.blocks)
    shard_units(inner, model.blocks)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[3]])
    fullshard.fully_shard(model.embed)
    whole = fullshard.fully_shard(nn.Sequential(model.embed, inner))
    actions = actions_of(whole, ids)
    first, last = (
        next(u.key for u in engine_of(whole).units if u.name == f"1.{i}") for i in (0, 3)
    )
    assert actions[actions.index(f"wait {first}") + 1] == f"unshard {last}"
    inner[0](noise(2, 6)).sum().backward()  # alone: the unit that it prefetches is not used
    assert engine_of(whole).scheduler.idle
    assert not any(engine_of(whole).meter.held_nbytes.values())


@on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_an_embedding_need_not_be_gathered_in_backward(reshard: bool) -> None:
    ids = torch.arange(8) % 11
    model, other = deep(reshard), deep(reshard)
    model.embed.set_unshard_in_backward(False)
    key = units(model)["embed"]
    for _ in range(2):
        actions = actions_of(model, ids)
        assert actions.count(f"unshard {key}") == 1
        assert actions.count(f"reduce_scatter {key}") == 1
        other(ids).sum().backward()
        assert torch.equal(
            model.embed.weight.grad.full_tensor(), other.embed.weight.grad.full_tensor()
        )


# methods as forwards


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.encode(x))

    def encode(self, x: Tensor, *, times: int = 1) -> Tensor:
        """Documented."""
        if times < 0:
            raise KeyError(times)
        return torch.tanh(self.first(x)) * times


class Encoder(nn.Module):
    """A module without a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


@on_ranks(2)
def test_a_module_without_a_forward_has_methods() -> None:
    plain: Any = fill(Encoder().double())
    model = fullshard.fully_shard(copy.deepcopy(plain))
    fullshard.register_fsdp_forward_method(model, "encode")
    for one in (plain, model):
        one.encode(batch()).square().sum().backward()
    ours, theirs = model.layer.weight.grad, plain.layer.weight.grad
    assert (ours.full_tensor() - theirs).abs().max() < 1e-12


@on_ranks(2)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_another_method_can_be_a_forward(reshard: bool | None) -> None:
    policy = {"reshard_after_forward": reshard}
    plain = fill(Two().double())
    model = fullshard.fully_shard(copy.deepcopy(plain), **policy)
    fullshard.register_fsdp_forward_method(model, "encode")
    fullshard.register_fsdp_forward_method(plain, "encode")
    assert model.encode.__doc__ == "Documented." and "encode" not in vars(plain)
    x = batch()
    for _ in range(2):
        for one in (plain, model):
            y = one.encode(x, times=2)
            assert y.dtype == torch.float64
            (y.sum() + one(x).sum()).backward()
        with torch.no_grad():
            assert torch.equal(model.encode(x), plain.encode(x))
        with pytest.raises(KeyError):
            model.encode(x, times=-1)
    assert engine_of(model).scheduler.idle
    assert torch.allclose(model.first.weight.grad.full_tensor(), plain.first.weight.grad)
    twin = copy.deepcopy(model)
    assert torch.equal(twin.encode(x), model.encode(x))
    with pytest.raises(AttributeError, match="FSDPTwo has no method 'decode'"):
        fullshard.register_fsdp_forward_method(model, "decode")


# hooks on parameters


@on_ranks(2, 3)
def test_an_optimizer_may_step_in_backward() -> None:
    def script(model: nn.Module) -> None:
        optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}
        calls = []

        def hook(param: nn.Parameter) -> None:
            calls.append(param)
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(hook)
        for number in range(3):
            calls.clear()
            model(batch(number)).square().mean().backward()
            assert len(calls) == len(set(calls)) == len(optimizers)
            assert all(param.grad is None for param in model.parameters())

    for reshard in (None, True, False):
        assert train_both(script, reshard_after_forward=reshard) < 1e-12


# copies


@on_ranks(2, 3)
def test_a_moving_average_is_a_copy() -> None:
    def script(model: nn.Module) -> None:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = optimizer_of(model)
        for number in range(3):
            step(model, optimizer, number)
            average.update_parameters(model)
        with torch.no_grad():
            seen.append(average(batch()))
        model.load_state_dict(average.module.state_dict())

    seen: list[Tensor] = []
    assert train_both(script) < 1e-12
    assert (seen[0] - seen[1]).abs().max() < 1e-12


@pytest.mark.parametrize(
    "when", ["at first", "after steps", "unsharded", "between forward and backward"]
)
@on_ranks(2, 3)
def test_a_deep_copy_trains_by_itself(when: str) -> None:
    model = shard(make(), mp_policy=fullshard.MixedPrecisionPolicy(reduce_dtype=torch.float64))
    model.blocks[0].weight.requires_grad_(False)
    model.blocks[0].weight.note = "mine"
    optimizer = optimizer_of(model)
    if when == "between forward and backward":
        loss = model(batch()).sum()
    elif when == "unsharded":
        model.unshard()
    elif when == "after steps":
        step(model, optimizer)
    twin = copy.deepcopy(model)
    if when == "between forward and backward":
        loss.backward()
        assert all(param.grad is None for param in twin.parameters())
    assert not set(map(id, twin.parameters())) & set(map(id, model.parameters()))
    assert type(twin) is type(model) and engine_of(twin) is not engine_of(model)
    assert twin.blocks[0].weight.note == "mine" and not twin.blocks[0].weight.requires_grad
    assert apart(twin, model) == 0
    before = full_parameters(model)
    optimizer = optimizer_of(twin)
    losses = [step(twin, optimizer, number) for number in range(3)]
    assert all(torch.equal(before[name], full) for name, full in full_parameters(model).items())
    assert apart(twin, model) > 0
    model.zero_grad()
    optimizer = optimizer_of(model)
    if when != "after steps":
        assert [step(model, optimizer, number) for number in range(3)] == losses
    again = copy.deepcopy(twin)
    assert apart(again, twin) == 0
    part = copy.deepcopy(model.blocks[1])
    part(batch()).sum().backward()
    assert engine_of(part).units != engine_of(model).units


# compiled


@on_ranks(2, timeout_s=120)
@pytest.mark.parametrize("what", ["blocks", "model"])
def test_compiled_blocks_and_models_train_alike(what: str) -> None:
    def script(model: nn.Module) -> None:
        run = model
        if isinstance(model, fullshard.FSDPModule):
            if what == "blocks":
                for block in model.blocks:
                    block.compile(backend="aot_eager")
            else:
                run = torch.compile(model, backend="aot_eager")
        optimizer = optimizer_of(model)
        for number in range(3):
            run(batch(number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    torch._dynamo.reset()
    warnings.simplefilter("ignore")  # warnings of the compiler
    for reshard in (True, False):
        assert train_both(script, reshard_after_forward=reshard) < 1e-12
    stats = torch._dynamo.utils.counters["stats"]
    assert stats["unique_graphs"] > 0, "nothing was compiled"


@on_ranks(2, timeout_s=120)
def test_transformers_generate() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config).eval()
    model = copy.deepcopy(plain)
    chosen = fullshard.shard_blocks(model)
    assert [u.name for u in chosen] == ["model.layers.0", "model.layers.1", ""]
    prompt = torch.arange(3, 9)[None]
    options = {"max_new_tokens": 8, "do_sample": False}
    want = plain.generate(prompt, **options)
    assert torch.equal(model.generate(prompt, **options), want)
    model(prompt, labels=prompt).loss.backward()
    assert torch.equal(model.generate(prompt, **options), want)
    assert not any(engine_of(model).meter.held_nbytes.values())


def printed() -> str:
    return repr(shard(make()))


def test_a_printed_model_shows_its_units(pool: RankPool) -> None:
    lines = [line.strip() for line in pool.run(2, printed)[0].splitlines()]
    assert lines[:2] == [
        "FSDPNet(",
        "a unit: 5 parameters, 95 elements, S(0) over 2 rank(s), 464 bytes a rank, 784 unsharded",
    ]
    # ModuleList prints equal modules once
    assert [line for line in lines if "a unit: " in line][1:] == [
        "(0-1): 2 x FSDPLinear(in_features=6, out_features=6, bias=True, a unit: 2 parameters, "
        "42 elements, S(0) over 2 rank(s), 176 bytes a rank, 336 unsharded)"
    ]


@on_ranks(2)
def test_time_spent_waiting_is_told() -> None:
    model = shard(make())
    assert model.waited_s() == 0
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(0.5)  # the other rank waits for this rank's data
    model(batch()).sum().backward()
    assert model.waited_s() > (0.2 if dist.get_rank() == 1 else 0)
    assert model.waited_s() == model.blocks[0].waited_s()


class Passes(torch.autograd.Function):
    """The identity, with an autograd node number even if no input needs a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return Passes.apply(self.layer(x))


@on_ranks(2)
def test_a_frozen_backbone_of_custom_functions_is_not_held() -> None:
    model = nn.Sequential(Custom(), Custom(), nn.Linear(6, 6)).double()
    model[:2].requires_grad_(False)
    fullshard.shard_blocks(model)
    for _ in range(2):
        model(batch()).sum().backward()
        assert not any(engine_of(model).meter.held_nbytes.values())


@on_ranks(2)
def test_parametrized_modules_are_copied_with_what_was_set() -> None:
    model = nn.Sequential(*(weight_norm(nn.Linear(6, 6)) for _ in range(2))).double()
    fullshard.shard_blocks(model)
    model.set_prefetch_budget(123)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(batch()), model(batch()))
    twin(batch()).sum().backward()
    assert all(param.grad is None for param in model.parameters())
    assert engine_of(twin).scheduler.policy.prefetch_budget == 123


@on_ranks(2)
def test_methods_of_an_instance_are_forwards_too() -> None:
    model = fullshard.fully_shard(Two().double())
    model.twice = MethodType(lambda self, x: self.first(x) * 2, model)
    model.encode = MethodType(lambda self, x: self.second(x), model)  # hides the class's method
    for name in ("twice", "encode"):
        fullshard.register_fsdp_forward_method(model, name)
        first = getattr(model, name)(batch())
        assert torch.equal(getattr(copy.deepcopy(model), name)(batch()), first)
    model.unshard()
    assert torch.equal(model.encode(batch()), model.second(batch()))
