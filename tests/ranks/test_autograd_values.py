"""Inputs and outputs of modules: structures, hidden tensors, nothing at all."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fullshard
from tests.ranks.autograd import Block, Case, Tower, compare, loss_of, worlds_and_policies
from tests.ranks.pool import RankPool


@dataclasses.dataclass
class Both:
    one: Tensor
    rest: Any = None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Frozen:
    one: Tensor
    derived: Any = dataclasses.field(init=False, default=None)


class Pair(NamedTuple):
    one: Tensor
    two: Any


class Output(OrderedDict):
    """A mapping whose entries are attributes too, like outputs of model libraries."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Gives(Block):
    """A block that takes and returns a structure, made by ``put`` and read by ``take``."""

    def __init__(self, put: Any, take: Any) -> None:
        super().__init__()
        self.put, self.take = put, take

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs and isinstance(args[0], Tensor):
            x = args[0]
        else:
            x = self.take(*args, **kwargs)
        return self.put(super().forward(x))


STRUCTURES: dict[str, tuple[Any, Any]] = {
    "dataclass": (lambda x: Both(x * 1, {"a": [x]}, "n"), lambda b: b.one + b.rest["a"][0]),
    "frozen_dataclass": (Frozen, lambda f: f.one),
    "named_tuple": (lambda x: Pair(x, [x * 2]), lambda p: p.one + p.two[0]),
    "dict": (lambda x: {"a": x, "b": {"c": x.sin(), 3: None}}, lambda d: d["a"] + d["b"]["c"]),
    "ordered_dict": (lambda x: OrderedDict(b=x, a=(x.cos(), 1)), lambda d: d["b"] * d["a"][0]),
    "dict_subclass": (lambda x: Output(b=x, a=x.cos()), lambda d: d.b * d.a),
    "nests": (lambda x: [(x, ([x.cos()],)), "s", None], lambda n: n[0][0] + n[0][1][0][0]),
    "torch_return_type": (lambda x: torch.sort(x, dim=1), lambda m: m.values + m.indices),
}


class Structures(Case):
    """Every block returns the structure and takes it as input."""

    put, take = STRUCTURES["dict"]

    def model(self) -> nn.Module:
        blocks = [Gives(type(self).put, type(self).take) for _ in range(3)]
        return Tower(*blocks, Gives(lambda x: x, type(self).take))


class Named(Tower):
    """A tower called by keyword, which calls its blocks by keyword."""

    def forward(self, *, x: Tensor, scale: float = 1.0) -> Any:  # type: ignore[override]
        for block in self.blocks:
            x = block(x=x) * scale
        return {"y": self.head(x)}


class Keywords(Case):
    def model(self) -> nn.Module:
        return Named()

    def step(self, model: Any, x: Tensor, number: int) -> None:
        loss_of(model(x=x, scale=0.5)["y"]).backward()

    def good(self, model: Any, x: Tensor) -> None:
        loss_of(model(x=x)["y"]).backward()


class Takes(Block):
    """A block that reads the tensor hidden in the previous block's output."""

    def __init__(self, take: Any) -> None:
        super().__init__()
        self.take = take

    def forward(self, hidden: Any) -> Tensor:
        return super().forward(self.take(hidden))


class HiddenInAnObject(Case):
    num_steps = 3
    num_warnings = 1
    hides = True

    def model(self) -> nn.Module:
        return Tower(
            Block(),
            Gives(lambda x: SimpleNamespace(x=x), lambda hidden: hidden),
            Takes(lambda hidden: hidden.x),
        )


class HiddenInASet(HiddenInAnObject):
    def model(self) -> nn.Module:
        return Tower(Block(), Gives(lambda x: {x}, None), Takes(lambda hidden: next(iter(hidden))))


class KeepsAside(Block):
    """A block that keeps a second result on itself, computed after or before the returned one."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        if not self.late:
            self.aside = self.down(hidden)
        y = x + self.down(hidden) * 2
        if self.late:
            self.aside = self.down(hidden)
        return y


class AnAuxiliaryLoss(Case):
    num_steps = 3
    num_warnings = 1
    hides = True
    late = True

    def model(self) -> nn.Module:
        return Tower(Block(), KeepsAside(self.late), Block())

    def step(self, model: Any, x: Tensor, number: int) -> None:
        loss = loss_of(model(x))
        aside = loss_of(model.blocks[1].aside)
        del model.blocks[1].aside
        if number == 0:
            (loss + aside).backward()
        elif number == 1:
            aside.backward()
        else:
            aside.backward(retain_graph=True)
            loss.backward()

    def good(self, model: Any, x: Tensor) -> None:
        loss_of(model(x)).backward()


class AnAuxiliaryLossOlderThanTheOutput(AnAuxiliaryLoss):
    """The auxiliary output is older, so backward reaches the returned output first.

    A backward of the auxiliary loss alone would read freed memory; see docs/limits.md.
    """

    num_steps = 1
    num_warnings = 0
    hides = False
    late = False


class KeepsItsLoss(Tower):
    def forward(self, x: Tensor) -> None:
        self.loss = loss_of(super().forward(x))


class NothingIsReturned(Case):
    num_steps = 3
    num_warnings = 1
    hides = True

    def model(self) -> nn.Module:
        return KeepsItsLoss()

    def step(self, model: Any, x: Tensor, number: int) -> None:
        model(x)
        model.loss.backward()
        del model.loss

    def good(self, model: Any, x: Tensor) -> None:
        self.step(model, x, 0)


class Doubles(Tower):
    """A tower with single-precision inputs, which it casts itself if ``by_hand``."""

    by_hand = True

    def forward(self, parts: Both) -> Tensor:  # type: ignore[override]
        pair = parts.rest["pair"]
        one, two = parts.one, pair.one
        if self.by_hand:
            one, two = one.double(), two.double()
        assert one.dtype == two.dtype == torch.float64
        assert pair.two.dtype == torch.int64
        return super().forward(one + two + pair.two)


class InputsAreCast(Case):
    """The engine casts floating-point tensors inside structures, and no others."""

    def model(self) -> nn.Module:
        return Doubles()

    def shard(self, model: Any, reshard: bool | None) -> None:
        model.by_hand = False
        policy = fullshard.MixedPrecisionPolicy(param_dtype=torch.float64)
        for unit in self.units(model):
            fullshard.fully_shard(unit, reshard_after_forward=reshard, mp_policy=policy)

    def step(self, model: Any, x: Tensor, number: int) -> None:
        parts = Both(x.float(), {"pair": Pair(x.sin().float(), x.long())})
        loss_of(model(parts)).backward()

    def good(self, model: Any, x: Tensor) -> None:
        self.step(model, x, 0)


@worlds_and_policies
@pytest.mark.parametrize("name", STRUCTURES)
def test_units_take_and_return_structures(
    pool: RankPool, name: str, world: int, reshard: bool | None
) -> None:
    pool.run(world, compare_structure, name, reshard)


def compare_structure(name: str, reshard: bool | None) -> None:
    put, take = STRUCTURES[name]
    kind = type(
        "OneStructure", (Structures,), {"put": staticmethod(put), "take": staticmethod(take)}
    )
    compare(kind, reshard)


@worlds_and_policies
@pytest.mark.parametrize(
    "kind",
    [
        Keywords,
        HiddenInAnObject,
        HiddenInASet,
        AnAuxiliaryLoss,
        AnAuxiliaryLossOlderThanTheOutput,
        NothingIsReturned,
        InputsAreCast,
    ],
    ids=lambda kind: kind.__name__,
)
def test_tensors_come_and_go_in_every_way(
    pool: RankPool, kind: type[Case], world: int, reshard: bool | None
) -> None:
    pool.run(world, compare, kind, reshard)
