"""Policies, state dicts and the meta device, compared with PyTorch's."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import fullshard
from tests.ranks.models import fill, full_parameters, noise
from tests.ranks.net import Net, batch, make, optimizer_of, step
from tests.ranks.pool import RankPool, on_ranks
from tests.ranks.rows import check_alike, each, grads, outcomes, raised, shard, shown, whole
from tests.versions import INTEGER_PARAMETERS, TORCH

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    value: Any
    label: str


class Own(dict[str, Any]):
    """A mapping class of the user."""


COUNT = torch.arange(2) if INTEGER_PARAMETERS else torch.arange(2.0)


class Probe(nn.Module):
    """A module that records its inputs and returns one of each structure."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.count = nn.Parameter(COUNT, requires_grad=False)
        self.register_buffer("offset", torch.zeros(4))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.seen = [str(t.dtype) for t in (x, self.weight, self.count, self.offset)]
        self.got = [kinds(a) for a in (*args, *kwargs.values())]
        return {"y": (x * self.weight, [self.count], Record(self.weight.sum(), "kept"), None, 3)}


def kinds(value: Any) -> Any:
    """Return the dtypes in the structure that holds the tensors."""
    if isinstance(value, Tensor):
        return str(value.dtype)
    if isinstance(value, PackedSequence):
        return "packed", str(value.data.dtype)
    if isinstance(value, dict):
        return {key: kinds(part) for key, part in value.items()}
    if isinstance(value, Record):
        return "record", kinds(value.value), value.label
    if isinstance(value, (list, tuple, set)):
        return type(value).__name__, [kinds(part) for part in value]
    return value


def policy_fields(fsdp: Any) -> Any:
    policy = fsdp.MixedPrecisionPolicy()
    newer = () if TORCH >= (2, 15) else ("param_dtype_override_fn",)  # fullshard always has it
    fields = [f.name for f in dataclasses.fields(policy) if f.name not in newer]
    return {
        "fields": [(name, getattr(policy, name)) for name in fields],
        "frozen": raised(lambda: setattr(policy, "param_dtype", BF16)),
        "offload": [f.name for f in dataclasses.fields(fsdp.OffloadPolicy())],
    }


def probe(fsdp: Any, **policy: Any) -> Any:
    module: Any = fsdp.fully_shard(Probe(), mp_policy=fsdp.MixedPrecisionPolicy(**policy))
    one = torch.ones(4)
    out = module(
        torch.ones(2, 4),
        [one, (one.long(), None)],
        Pair(one, 1),
        {one},
        record=Record(one, "a"),
        plain={"a": one},
        ordered=collections.OrderedDict(a=one),
        packed=pack_sequence([one]),
        other=object,
    )
    out["y"][0].sum().backward()
    return [module.seen, module.got, kinds(out), str(module.weight.grad.dtype), grads(module)]


def param_dtype(fsdp: Any) -> Any:
    return [probe(fsdp, param_dtype=dtype) for dtype in (None, FP32, BF16)]


def reduce_dtype(fsdp: Any) -> Any:
    """Reduce whole numbers, which no dtype rounds."""
    return [
        probe(fsdp, param_dtype=dtype, reduce_dtype=reduce)
        for dtype in (None, BF16)
        for reduce in (None, FP32, BF16, FP64)
    ]


def output_dtype(fsdp: Any) -> Any:
    return [probe(fsdp, param_dtype=dtype, output_dtype=FP64) for dtype in (None, BF16)]


def cast_forward_inputs(fsdp: Any) -> Any:
    seen = []
    for casts in (True, False):
        policy = fsdp.MixedPrecisionPolicy(param_dtype=FP64, cast_forward_inputs=casts)
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        fsdp.fully_shard([model[0], model[1]], mp_policy=policy)
        fsdp.fully_shard(model)
        seen.append(raised(lambda model=model: model(torch.ones(1, 3))))
    return seen


def state_dicts(fsdp: Any) -> Any:
    model = shard(fsdp, make(), reshard_after_forward=False)
    params = dict(model.named_parameters())
    model(batch())
    state = model.state_dict()
    places = {
        name: value.to_local().untyped_storage().data_ptr()
        == params[name].to_local().untyped_storage().data_ptr()  # type: ignore[attr-defined]
        for name, value in state.items()
    }
    optimizer = torch.optim.SGD(params.values(), lr=0.1)
    model(batch()).sum().backward()
    optimizer.step()
    follows = [torch.equal(whole(state[n]), whole(p)) for n, p in model.named_parameters()]
    return [list(state), [isinstance(v, DTensor) for v in state.values()], places, follows]


def loads(fsdp: Any) -> Any:
    model = shard(fsdp, make())
    params = list(model.parameters())
    other = {name: value.clone().fill_(0.25) for name, value in model.state_dict().items()}
    model.load_state_dict(other)
    kept = [a is b for a, b in zip(params, model.parameters(), strict=True)]
    loaded = full_parameters(model)
    again = {name: value.clone().fill_(0.5) for name, value in other.items()}
    model.load_state_dict(again, assign=True)
    swapped = [a is b for a, b in zip(params, model.parameters(), strict=True)]
    model(batch()).sum().backward()
    plain = {name: value.full_tensor() for name, value in again.items()}
    # The mesh has its own name: fullshard copies full tensors to DTensors on the meshes that it
    # shards over, so PyTorch must not share one.
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(fsdp.__name__,))
    other_model = shard(fsdp, make(), mesh=mesh)
    return [
        kept,
        loaded,
        swapped,
        full_parameters(model),
        grads(model),
        raised(lambda: other_model.load_state_dict(plain)),
    ]


def loads_in_parts(fsdp: Any) -> Any:
    with torch.device("meta"):
        model = shard(fsdp, Net().double())
    source = shard(fsdp, make()).state_dict()
    for name in source:
        model.load_state_dict({name: source[name]}, assign=True, strict=False)
    model(batch()).square().sum().backward()
    return grads(model)


def helpers_of_checkpoints(fsdp: Any) -> Any:
    model = shard(fsdp, make())
    optimizer = optimizer_of(model)
    step(model, optimizer)
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=options)
    of_optimizer = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    other = shard(fsdp, Net().double())
    set_model_state_dict(other, dict(state), options=options)
    return [
        {name: (type(value).__name__, whole(value)) for name, value in state.items()},
        {name: list(map(whole, values.values())) for name, values in of_optimizer.items()},
        full_parameters(other),
    ]


def meta_device(fsdp: Any) -> Any:
    with torch.device("meta"):
        model = shard(fsdp, Net())
        other = shard(fsdp, Net())  # PyTorch's module is unusable after a refusal
    before = [p.is_meta for p in model.parameters()]
    refused = raised(lambda: other(batch()))
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.constant_(param, 0.5)
    model(batch(0, torch.float32)).square().sum().backward()
    return [before, refused, {name: round(g.sum().item(), 3) for name, g in grads(model).items()}]


@each(
    policy_fields,
    param_dtype,
    reduce_dtype,
    output_dtype,
    cast_forward_inputs,
    state_dicts,
    loads,
    loads_in_parts,
    helpers_of_checkpoints,
    meta_device,
)
def test_as_in_pytorch(pool: RankPool, program: Any) -> None:
    check_alike(pool, program)


def class_of_a_mapping(fsdp: Any) -> Any:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, given: Any) -> str:
            return type(given).__name__

    policy = fsdp.MixedPrecisionPolicy(param_dtype=BF16)
    return fsdp.fully_shard(Takes(), mp_policy=policy)(Own(a=torch.ones(2)))


def test_mappings_keep_their_class(pool: RankPool) -> None:
    assert pool.run(2, outcomes, class_of_a_mapping) == [("dict", "Own")] * 2


@dataclasses.dataclass
class Linked:
    """A record that refers to another, which refers back to it."""

    value: Any
    derived: Any = dataclasses.field(init=False, default=None)
    other: Any = None


class TakesLinked(nn.Linear):
    def forward(self, given: Any) -> Any:  # type: ignore[override]
        given = given.other.other
        return super().forward(given.value + given.derived)


@on_ranks(2)
@pytest.mark.parametrize("dtype", [None, BF16], ids=str)
def test_an_argument_that_holds_itself_is_taken(dtype: Any) -> None:
    """A dataclass argument may contain itself; PyTorch refuses nesting deeper than 128."""
    found = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        model = TakesLinked(4, 4)
        if is_sharded:
            policy = fullshard.MixedPrecisionPolicy(param_dtype=dtype)
            model = fullshard.fully_shard(model, mp_policy=policy)
        given = Linked(torch.ones(2, 4, requires_grad=True))
        given.derived, given.other = given.value * 2, Linked(None)
        given.other.other = given
        out = model(given)
        out.float().sum().backward()
        found.append((out.sum().item(), given.value.grad.sum().item()))
    plain, sharded = found
    assert sharded == pytest.approx(plain, rel=0.02 if dtype else 1e-6)


def state_of_an_optimizer_after_an_evaluation(fsdp: Any) -> Any:
    model = shard(fsdp, fill(Net().double()))
    optimizer = optimizer_of(model)
    step(model, optimizer)
    with torch.no_grad():
        model(noise(2, 6))
    return raised(lambda: get_optimizer_state_dict(model, optimizer)), shown(model)


def test_an_evaluation_leaves_the_model_sharded(pool: RankPool) -> None:
    """An evaluation reshards the root; PyTorch keeps it unsharded, and its state dict fails."""
    for (theirs, whole_root), ours in pool.run(
        2, outcomes, state_of_an_optimizer_after_an_evaluation
    ):
        assert theirs.kinds[0] == "KeyError" and "whole" in whole_root
        assert ours == ("nothing raised", ["sharded"] * len(whole_root))
