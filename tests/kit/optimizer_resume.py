"""Jobs whose optimizers resume from a checkpoint."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import PerParameter, Ragged, ShardingStrategy, checkpoint, fully_shard
from fullshard.optim import ShardedOptimizer
from tests.ranks.models import fill, noise

# Adafactor, Muon and LBFGS use more than single elements, and SparseAdam needs sparse gradients;
# see docs/limits.md.
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adadelta": (optim.Adadelta, {}),
    "adagrad": (optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    "adam": (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "adamw": (optim.AdamW, {"maximize": True, "foreach": False}),
    "adamw fused": (optim.AdamW, {"fused": True}),
    "adamax": (optim.Adamax, {}),
    "asgd": (optim.ASGD, {"t0": 1, "lambd": 0.1}),
    "asgd, a tensor as rate": (optim.ASGD, {"lr": [0.01], "t0": 1, "foreach": False}),
    "nadam": (optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "radam": (optim.RAdam, {}),
    "rmsprop": (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "rprop": (optim.Rprop, {}),
    "sgd": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "plain sgd": (optim.SGD, {"lr": 0.1}),
}


ON_PIECES_ONLY = ("rprop",)  # PyTorch's class does not work on DTensors


FACES = ["per_parameter", "element", "row", "int", "tensor", "originals", "flat", "no_shard"]


LAYOUTS: dict[str, Any] = {
    "per_parameter": PerParameter(),
    "element": Ragged(),
    "row": Ragged("row"),
    "int": Ragged(2),
    "tensor": Ragged("tensor"),
}


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.gain


class Scales(nn.Module):
    """Parameters of one element in three shapes among others, like CLIP's ``logit_scale``."""

    def __init__(self, *, scalars: bool = True) -> None:
        super().__init__()
        self.inner = Inner()
        self.column = nn.Parameter(torch.ones(4, 1))
        if scalars:
            self.logit_scale = nn.Parameter(torch.tensor(0.5))
        self.cell = nn.Parameter(torch.ones(1, 1))
        self.double()
        fill(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) + self.cell + self.column.flatten()
        return y * self.logit_scale.exp() if hasattr(self, "logit_scale") else y


def sharded(face: str, *, scalars: bool) -> Any:
    model: Any = Scales(scalars=scalars)
    if face in LAYOUTS:
        fully_shard(model.inner, layout=LAYOUTS[face])
        return fully_shard(model, layout=LAYOUTS[face])
    options: dict[str, Any] = {"use_orig_params": face != "flat"}
    if face == "no_shard":
        options["sharding_strategy"] = ShardingStrategy.NO_SHARD
    model.inner = FSDP(model.inner, **options)
    return FSDP(model, **options)


def made(kind: str, model: nn.Module, *, by_runs: bool = False) -> Optimizer:
    cls, kwargs = OPTIMIZERS[kind]
    kwargs = {key: torch.tensor(v) if isinstance(v, list) else v for key, v in kwargs.items()}
    if by_runs:
        return ShardedOptimizer(model.parameters(), cls, **kwargs)
    return cls(model.parameters(), **kwargs)


def step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    model(noise(5, 3, seed=number)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, Tensor]:
    return checkpoint.full_state_dict(model, rank0_only=False)


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert list(one) == list(other)
    return max((one[name] - other[name]).abs().max().item() for name in one)


class Course:
    """A plain model after two steps, and its parameters after two more."""

    def __init__(self, kind: str, *, scalars: bool) -> None:
        self.model = Scales(scalars=scalars)
        self.optimizer = made(kind, self.model)
        for number in range(2):
            step(self.model, self.optimizer, number)
        resumed = copy.deepcopy(self.model)  # PyTorch casts state on the way
        its = made(kind, resumed)
        its.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        for number in range(2, 4):
            step(resumed, its, number)
        self.end = {name: value.clone() for name, value in resumed.state_dict().items()}

    def check_state(self, state: dict[str, Any]) -> None:
        for name, param in self.model.named_parameters():
            expected = self.optimizer.state.get(param, {})
            found = state["state"].get(name, {})
            assert found.keys() == expected.keys(), name
            for key, value in expected.items():
                if isinstance(value, Tensor):
                    assert found[key].shape == value.shape, (name, key)
                    assert (found[key] - value).abs().max() < 1e-12, (name, key)


def can_step(kind: str, face: str, *, by_runs: bool) -> bool:
    return by_runs or face not in LAYOUTS or kind not in ON_PIECES_ONLY


def resumes(face: str, other: str, half: int | None = None) -> list[str]:
    """Resume in ``face`` from sharded state, and in ``other`` from full state; return failures.

    ``half``: only the even (0) or odd (1) optimizers.
    """
    failed = []
    scalars = "per_parameter" not in (face, other)  # per_parameter refuses scalars
    for number, kind in enumerate(OPTIMIZERS):
        if half is not None and number % 2 != half:
            continue
        by_runs = (number // 2 + FACES.index(face)) % 2 == 1
        by_runs = by_runs or not can_step(kind, face, by_runs=False)
        try:
            resumes_one(Course(kind, scalars=scalars), kind, face, other, by_runs=by_runs)
        except Exception as error:
            failed.append(f"{kind}, by_runs={by_runs}: {type(error).__name__}: {error}"[:300])
    return failed


def resumes_one(course: Course, kind: str, face: str, other: str, *, by_runs: bool) -> None:
    source = sharded(face, scalars=hasattr(course.model, "logit_scale"))
    its = made(kind, source, by_runs=by_runs)
    for number in range(2):
        step(source, its, number)
    full = checkpoint.full_optim_state_dict(source, its, rank0_only=False)
    course.check_state(full)
    parts = checkpoint.sharded_optim_state_dict(source, its, plain_shards=True)
    for target, state in ((face, parts), (other, full)):
        runs = by_runs if target == face else not by_runs
        if not can_step(kind, target, by_runs=runs):
            continue
        model = sharded(target, scalars=hasattr(course.model, "logit_scale"))
        optimizer = made(kind, model, by_runs=runs)
        checkpoint.load_full_state_dict(model, values(source))
        if state is parts:
            checkpoint.load_sharded_optim_state_dict(model, optimizer, state)
        else:
            sent = state if dist.get_rank() == 0 else {}
            checkpoint.load_full_optim_state_dict(model, optimizer, sent, broadcast_from_rank0=True)
        for number in range(2, 4):
            step(model, optimizer, number)
        assert apart(values(model), course.end) < 1e-12, f"to {target}"
