"""Which tensor of a model has which name, and on which mesh all of them lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard.engine import Unit
from fullshard.errors import ConfigError
from fullshard.frontend.contexts import (
    clean_name,
    full_held,
    full_value,
    is_first_rank,
    named_sharded,
    units_at_rest,
)
from fullshard.frontend.hooks import engine_of
from fullshard.frontend.places import Held, held_params
from fullshard.frontend.sharded import state_dict_as_it_is
from fullshard.tensors import on_larger_mesh, plainly_sharded


class Row(NamedTuple):
    """One value of a state dict, of a model or of an optimizer."""

    name: str
    """Of the parameter or buffer, without what wrappers add."""
    value: Any
    """The parameter or buffer itself, what an optimizer keeps, or whatever else a module saves;
    a DTensor, if ranks hold parts of it."""
    held: Held | None = None
    """Where a unit keeps it, if one does."""
    own_name: str = ""
    """As ``module.state_dict()`` has it."""
    key: str = ""
    """What an optimizer calls it."""


class Tree:
    """A model between steps, with nothing lent.

    Raises:
        ProtocolError: it is not.
    """

    def __init__(self, module: nn.Module, what: str) -> None:
        self.module = module
        self.units: list[Unit] = units_at_rest(module, what)
        self._held = {id(held.param): held for held in held_params(self.units).values()}
        self._shown: dict[Held, Tensor] = {}

    def rows(self) -> Iterator[Row]:
        """Yield all values, in the order of the unsharded model's state dict."""
        own = state_dict_as_it_is(self.module, self.units)
        names = {clean_name(name) for name in own}
        if len(names) < len(own):
            raise ConfigError(
                "state dict: two names are one without the prefixes of wrappers: "
                f"{sorted(own)[:8]}; rename a module"
            )
        for name, value in own.items():
            held = self._held.get(id(value))
            shown = value if held is None else self.shown(held)
            yield Row(clean_name(name), shown, held, own_name=name)

    def shown(self, held: Held) -> Tensor:
        """A sharded parameter as a DTensor, always the same one."""
        if held not in self._shown:
            self._shown[held] = held.as_dtensor()
        return self._shown[held]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters by clean names, sharded ones as ``shown``, tied ones once."""
        for name, param, held in named_sharded(self.module, self.units):
            yield name, param if held is None else self.shown(held)

    def all_held(self) -> Iterable[Held]:
        """The parameters that units keep."""
        return self._held.values()

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of all that the model lies on."""
        return is_first_rank(self.units)

    @property
    def mesh(self) -> DeviceMesh | None:
        """The largest mesh that something of the model lies on."""
        meshes = [self.shown(held).device_mesh for held in self._held.values()]  # type: ignore[attr-defined]
        return max(meshes, key=_extent, default=None)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.units[0].device if self.units else torch.device("cpu")

    def rewritten(self) -> None:
        """Sharded parameters have new values."""
        for unit in self.units:
            engine_of(unit).rewritten(unit)


def _extent(mesh: DeviceMesh) -> tuple[int, int, bool]:
    """Of meshes of the same ranks, that with the dims in their usual order is the largest."""
    ranks = mesh.mesh.flatten().tolist()
    return mesh.size(), mesh.ndim, ranks == sorted(ranks)


def full(
    tree: Tree, rows: Sequence[Row], *, rank0_only: bool, cpu: bool, copies: bool = True
) -> Iterator[tuple[Row, Any]]:
    """Yield each row and its value whole, gathered one at a time; collective.

    With ``rank0_only`` nothing is yielded on other ranks than the first, which gather all the
    same. Tied parameters are one tensor here, too. What is whole already is copied, unless it is
    wanted without ``copies``.
    """
    is_given = not rank0_only or tree.is_first
    seen: dict[int, Any] = {}
    for row in rows:
        number = id(row.value)
        if row.key or number not in seen:
            whole = row.value
            if row.held is not None:
                whole = full_held(row.held, rank0_only=rank0_only)
            elif isinstance(whole, Tensor):
                whole = full_value(row.value)
                if copies and not isinstance(row.value, DTensor):
                    whole = whole.clone()
            on_cpu = cpu and is_given and isinstance(whole, Tensor)
            seen[number] = whole.cpu() if on_cpu else whole if is_given else None
        if is_given:
            yield row, seen[number]


def sharded(
    rows: Iterable[Row], mesh: DeviceMesh | None, *, plain_shards: bool
) -> Iterator[tuple[Row, Any]]:
    """Yield each row and its value as sharded state dicts have it, around the live memory.

    Args:
        rows: of a model or an optimizer.
        mesh: what values should lie on where that takes no communication; None: their own.
        plain_shards: gather what is placed with other than ``Shard`` and ``Replicate``.
    """
    for row in rows:
        value = row.value.detach() if isinstance(row.value, Tensor) else row.value
        if isinstance(value, DTensor) and plain_shards:
            value = plainly_sharded(value, mesh)
        elif isinstance(value, DTensor) and mesh is not None:
            value = on_larger_mesh(value, mesh)
        yield row, value
