"""Modules of every kind train sharded as they do unsharded."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from fullshard import fully_shard
from tests.ranks.models import fill, full_parameters, ids, shard_units
from tests.ranks.pool import RankPool
from tests.ranks.zoo import ZOO, Specimen

STEPS = 2
worlds = pytest.mark.parametrize("world", [2, 3])


def make(specimen: Specimen) -> nn.Module:
    torch.manual_seed(0)  # for spectral_norm's random vectors; jobs have their own generator
    model = specimen.make()
    if not any(p.dtype is torch.float64 for p in model.parameters()):
        model = model.double()
    return fill(model)


def shard(model: nn.Module, specimen: Specimen) -> None:
    for name in specimen.units:
        fully_shard(model.get_submodule(name), **specimen.options)
    fully_shard(model, **specimen.options)


def share(whole: Tensor, specimen: Specimen, rank: int, world: int) -> Tensor:
    """Return this rank's samples."""
    size = len(whole) // world
    return whole if specimen.same_data else whole[rank * size : (rank + 1) * size]


def train(model: nn.Module, data: Tensor, micro: int = 1) -> dict[str, Tensor]:
    """Train; return full parameters, buffers and the output of an evaluation."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        for number in range(micro):
            if micro > 1 and hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(number == micro - 1)
            model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    result = full_parameters(model) | {n: b.clone() for n, b in model.named_buffers()}
    model.eval()
    with torch.no_grad():
        result["(output)"] = model(data)
    return result


def difference(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest difference of each entry that has elements."""
    assert got.keys() == expected.keys()
    return {
        name: (got[name].double() - value.double()).abs().max().item()
        for name, value in expected.items()
        if value.numel()
    }


def compare(kind: str, micro: int = 1) -> tuple[dict[str, float], float]:
    specimen = ZOO[kind]
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = specimen.data(2 * world)
    plain = make(specimen)
    model = copy.deepcopy(plain)
    before = full_parameters(plain)
    expected = train(plain, whole, micro)
    expected["(output)"] = share(expected["(output)"], specimen, rank, world)
    shard(model, specimen)
    got = train(model, share(whole, specimen, rank, world), micro)
    moved = max(difference(full_parameters(plain), before).values())
    return difference(got, expected), moved


def check(results: list[tuple[dict[str, float], float]], tolerance: float) -> None:
    for differences, moved in results:
        wrong = {name: value for name, value in differences.items() if not value <= tolerance}
        assert not wrong
        assert moved > 1e-4


@worlds
@pytest.mark.parametrize("kind", ZOO)
def test_it_trains_as_it_does_unsharded(pool: RankPool, world: int, kind: str) -> None:
    check(pool.run(world, compare, kind), ZOO[kind].tolerance)


@pytest.mark.parametrize("kind", ["lstm", "sparse", "tied", "several_dtypes", "empty"])
def test_it_accumulates_gradients_as_it_does_unsharded(pool: RankPool, kind: str) -> None:
    check(pool.run(2, compare, kind, micro=3), ZOO[kind].tolerance)


# transformers


def transformer(kind: str) -> tuple[nn.Module, Any]:
    """Return a tiny model and its layers."""
    import transformers as hf

    size = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    if kind == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**size, **heads))
        return model, model.model.layers
    if kind == "mixtral":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}  # grouped_mm lacks fp64
        model = hf.MixtralForCausalLM(
            hf.MixtralConfig(**size, **heads, **experts, experts_implementation="eager")
        )
        return model, model.model.layers
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = hf.GPT2Config(vocab_size=61, n_embd=24, n_layer=2, n_head=4, n_positions=16, **drop)
    model = hf.GPT2LMHeadModel(config)
    return model, model.transformer.h


def train_transformer(model: nn.Module, rank: int, world: int) -> tuple[list[float], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    tokens = ids(4, 9, vocab=61, seed=1)
    mine = tokens[rank * 4 // world : (rank + 1) * 4 // world]
    for _ in range(5):
        logits = model(input_ids=mine, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    total = torch.stack(losses)
    if world > 1:
        dist.all_reduce(total)
    return (total / world).tolist(), full_parameters(model)


def compare_transformer(kind: str) -> tuple[float, float, bool]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated calls within transformers
        plain, _ = transformer(kind)
        model, layers = transformer(kind)
        fill(plain.double(), scale=0.1)
        model.double().load_state_dict(plain.state_dict())
        expected, expected_params = train_transformer(plain, 0, 1)
        shard_units(model, layers)
        losses, params = train_transformer(model, dist.get_rank(), dist.get_world_size())
    assert params.keys() == expected_params.keys()
    return (
        max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        max((params[n] - expected_params[n]).abs().max().item() for n in params),
        losses[-1] < losses[0],
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_transformers_models_train_as_they_do_unsharded(pool: RankPool, kind: str) -> None:
    pytest.importorskip("transformers")
    for loss, param, fell in pool.run(2, compare_transformer, kind, timeout_s=180.0):
        assert loss <= 1e-6
        assert param <= 1e-6
        assert fell
