"""Errors name the cause in fullshard's terms, and their advice works."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard import (
    FullyShardedDataParallel,
    Ragged,
    fully_shard,
    shard_blocks,
    unshard_params,
)
from fullshard.checkpoint import full_state_dict
from fullshard.errors import AlreadyShardedError, ConfigError, UnsupportedError
from fullshard.wrap import ModuleWrapPolicy
from tests.ranks.models import full_parameters, noise, refusal, shard_units
from tests.ranks.net import apart, batch, make, shard
from tests.ranks.pool import RankPool, on_ranks

LAYOUTS: dict[str, dict[str, Any]] = {"per parameter": {}, "ragged": {"layout": Ragged()}}
both_layouts = pytest.mark.parametrize("layout", list(LAYOUTS))


# Optimizers that use more than single elements


def stepped_by(cls: type[torch.optim.Optimizer], model: Any) -> torch.optim.Optimizer:
    """Return an optimizer of the matrices, since Muon accepts no other parameters."""
    return cls([p for p in model.parameters() if p.dim() == 2], lr=0.1)  # type: ignore[call-arg]


def run(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
    def closure() -> Tensor:
        model.zero_grad()
        loss: Tensor = model(batch(number)).square().mean()
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


WANTED = {
    "Adafactor": "means over rows",
    "LBFGS": "one vector",
    "Muon": "whole matrices",
    "SparseAdam": "sparse gradients",
}


@on_ranks(2)
@both_layouts
@pytest.mark.parametrize("name", list(WANTED))
def test_optimizers_of_more_than_an_element_are_refused(name: str, layout: str) -> None:
    """Each step is refused before it begins, by class, parameter, reason and alternative."""
    model: Any = shard(make(), **LAYOUTS[layout])
    before = full_parameters(model)
    optimizer = stepped_by(getattr(torch.optim, name), model)
    messages = set()
    for _ in range(2):
        messages.add(refusal(UnsupportedError, run, model, optimizer))
    after = full_parameters(model)
    assert not optimizer.state
    assert all(torch.equal(before[key], after[key]) for key in before)
    (message,) = messages
    assert message.startswith(f"{name} ") and WANTED[name] in message
    assert "plain.0.weight" in message and "Adam" in message


@on_ranks(1, 2)
@pytest.mark.parametrize("name", ["LBFGS", "Muon"])
def test_they_step_what_is_whole_on_every_rank(name: str) -> None:
    """Parameters that every rank has in full can be stepped, as the errors advise."""
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard")
    )
    plain: Any = make()
    model: Any = shard(copy.deepcopy(plain), mesh=mesh)
    for one in (plain, model):
        optimizer = stepped_by(getattr(torch.optim, name), one)
        for number in range(3):
            run(one, optimizer, number)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert apart(model, plain) <= 1e-12


@on_ranks(2)
def test_lbfgs_steps_what_is_cut_evenly() -> None:
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model: Any = fully_shard(copy.deepcopy(plain))
    for one in (plain, model):
        optimizer = torch.optim.LBFGS(one.parameters(), lr=0.1)
        for number in range(3):
            run(one, optimizer, number)
    assert apart(model, plain) <= 1e-12


@on_ranks(2)
def test_lbfgs_on_a_mix_is_refused() -> None:
    model: Any = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    fully_shard(model, ignored_params={model[2].bias})
    message = refusal(UnsupportedError, run, model, torch.optim.LBFGS(model.parameters()))
    assert "several meshes or on none" in message


@on_ranks(2)
def test_adafactor_steps_parameters_that_were_ignored() -> None:
    """Ignored parameters can be stepped, as Adafactor's error advises."""
    plain: Any = make()
    model: Any = copy.deepcopy(plain)
    ignored = [p for p in model.parameters() if p.dim() == 2]
    fully_shard(model, ignored_params=set(ignored))
    for one in (plain, model):
        optimizer = stepped_by(torch.optim.Adafactor, one)
        for number in range(3):
            optimizer.zero_grad()
            mine = batch(number)
            if one is model:
                mine = mine.chunk(dist.get_world_size())[dist.get_rank()]
            one(mine).square().mean().backward()
            for param in ignored if one is model else ():
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
            optimizer.step()
    assert apart(model, plain) <= 1e-12


@on_ranks(2)
def test_parameters_of_others_are_left_alone() -> None:
    """Optimizers step DTensors that fullshard did not shard."""
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    fully_shard(nn.Linear(2, 2), mesh=mesh)
    param = nn.Parameter(distribute_tensor(noise(4, 4), mesh))
    optimizer = torch.optim.Muon([param])
    param.grad = distribute_tensor(noise(4, 4, seed=1), mesh)
    optimizer.step()
    assert optimizer.state


# Tied parameters


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.body(self.embed(x))))
        return y


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.it: Any = Tied()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.it(x)
        return y


def wrapped(module: nn.Module, **options: Any) -> Any:
    return FullyShardedDataParallel(
        module, device_id=torch.device("cpu"), use_orig_params=True, **options
    )


def parts(model: Wrapper) -> None:
    fully_shard(model.it.embed)
    fully_shard(model.it.head)


def part_and_whole(model: Wrapper) -> None:
    fully_shard(model.it.embed)
    fully_shard(model)


def lists(model: Wrapper) -> None:
    fully_shard([model.it.body[0], model.it.embed])
    fully_shard([model.it.head, model.it.body[1]])


def wrappers(model: Wrapper) -> None:
    model.it.embed = wrapped(model.it.embed)
    wrapped(model)


def policy(model: Wrapper) -> None:
    wrapped(model, auto_wrap_policy=ModuleWrapPolicy({nn.Embedding}))


def blocks(model: Wrapper) -> None:
    shard_blocks(model, policy=ModuleWrapPolicy({nn.Embedding}))


@on_ranks(2)
@pytest.mark.parametrize("shards", [parts, part_and_whole, lists, wrappers, policy, blocks])
def test_ties_between_units_name_both_places(shards: Callable[[Wrapper], None]) -> None:
    """The error has names in the full model, also if a call was given only a part of the model."""
    with pytest.raises(ConfigError, match="tied") as caught:
        shards(Wrapper())
    message = str(caught.value)
    assert "it.embed.weight" in message and "it.head.weight" in message


@on_ranks(2)
def test_a_module_in_two_places_is_named_by_both() -> None:
    linear = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": nn.Sequential(linear), "b": nn.Sequential(linear)})
    fully_shard(model["a"])
    message = refusal(AlreadyShardedError, fully_shard, model["b"])
    assert "a.0.weight, b.0.weight" in message


def tied_as_advised(face: str) -> float:
    torch.manual_seed(0)
    plain = Tied().double()
    model: Any = copy.deepcopy(plain)
    if face == "wrapper":
        model.embed = wrapped(model.embed, ignored_states=[model.embed.weight])
        model = wrapped(model)
    elif face == "one call":
        fully_shard([model.embed, model.head])
        fully_shard(model)
    else:
        fully_shard(model.embed, ignored_params={model.embed.weight})
        fully_shard(model)
    for one in (plain, model):
        optimizer = torch.optim.AdamW(one.parameters())
        for number in range(3):
            one(torch.arange(5) + number % 2).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    x = torch.arange(6)
    with torch.no_grad():
        return float((plain(x) - model(x)).abs().max())


@pytest.mark.parametrize("face", ["one call", "ignored", "wrapper"])
def test_ties_can_be_sharded_as_advised(pool: RankPool, face: str) -> None:
    assert max(pool.run(2, tied_as_advised, face)) <= 1e-12


# Embeddings of transformers


def llama() -> Any:
    import transformers as hf

    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return hf.LlamaForCausalLM(config)


def sharded_llama(way: str) -> Any:
    model = llama()
    if way in ("wrapper", "flat wrapper"):
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(model, device_id=cpu, use_orig_params=way == "wrapper")
    return shard_units(model, model.model.layers, **LAYOUTS[way])


def loss_of(model: Any) -> Tensor:
    ids = torch.arange(8)[None]
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


WAYS = [*LAYOUTS, "wrapper", "flat wrapper"]


def resized(way: str) -> str:
    model = sharded_llama(way)
    before = loss_of(model).item()
    assert model.resize_token_embeddings(16) is model.resize_token_embeddings()
    messages = set()
    for means in (False, True):
        messages.add(
            refusal(UnsupportedError, model.resize_token_embeddings, 20, mean_resizing=means)
        )
    if way in LAYOUTS:
        with unshard_params(model), pytest.raises(UnsupportedError, match="20 rows"):
            model.resize_token_embeddings(17, pad_to_multiple_of=4)
    assert loss_of(model).item() == before
    loss_of(model).backward()
    (message,) = messages
    return message


@pytest.mark.parametrize("way", WAYS)
def test_sharded_embeddings_are_not_resized(pool: RankPool, way: str) -> None:
    """A refused resize leaves the model unchanged, and a resize to the same size is allowed."""
    pytest.importorskip("transformers")
    for message in pool.run(2, resized, way):
        assert "20 rows instead of 16, but model.embed_tokens.weight" in message
        assert "Resize before sharding" in message and "full_state_dict" in message


def resized_as_advised() -> list[float]:
    model = sharded_llama("per parameter")
    values = full_state_dict(model, rank0_only=False)
    anew = llama()
    anew.load_state_dict(values)
    anew.resize_token_embeddings(20, mean_resizing=False)
    plain = copy.deepcopy(anew)
    shard_units(anew, anew.model.layers)
    losses = [loss_of(one) for one in (plain, anew)]
    losses[1].backward()
    assert anew.get_input_embeddings().weight.shape == (20, 8)
    return [loss.item() for loss in losses]


def test_embeddings_are_resized_as_advised(pool: RankPool) -> None:
    pytest.importorskip("transformers")
    for plain, sharded in pool.run(2, resized_as_advised):
        assert plain == pytest.approx(sharded, abs=1e-6)


def resized_beside() -> None:
    """Resize embeddings that no unit owns."""
    model = llama()
    ends = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    fully_shard(model, ignored_params=ends)
    model.resize_token_embeddings(20, mean_resizing=False)
    loss_of(model).backward()
    assert model.get_input_embeddings().weight.shape == (20, 8)


def test_embeddings_that_are_not_sharded_are_resized(pool: RankPool) -> None:
    pytest.importorskip("transformers")
    pool.run(2, resized_beside)
