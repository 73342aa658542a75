"""Which tensor of a model has which name, and on which mesh all of them lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

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

__all__ = ["Entry", "Tree", "shown_sharded"]


@dataclass(frozen=True)
class Entry:
    """One line of a state dict."""

    name: str
    """Without what wrappers add."""
    own_name: str
    """As ``module.state_dict()`` has it."""
    value: Any
    """The parameter or buffer itself, or whatever else a module saves."""
    held: Held | None
    """Where a unit keeps it, if one does."""


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

    def entries(self) -> Iterator[Entry]:
        """All lines, in the order of the unsharded model's state dict."""
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
            yield Entry(clean_name(name), name, shown, held)

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

    def full(
        self, value: Any, held: Held | None = None, *, first_only: bool, copies: bool = True
    ) -> Any:
        """``value`` whole, or None where it is not wanted; collective.

        It is in memory of its own, but for what is whole already, without ``copies``.
        """
        if not isinstance(value, Tensor):
            return value
        if held is not None:
            return full_held(held, rank0_only=first_only)
        full = full_value(value)
        return full.clone() if copies and not isinstance(value, DTensor) else full

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


def shown_sharded(value: Any, mesh: DeviceMesh | None, *, plain_shards: bool) -> Any:
    """``value`` as sharded state dicts have it; with a ``mesh`` on all of it if it can be."""
    if not isinstance(value, DTensor):
        return value.detach() if isinstance(value, Tensor) else value
    shown: Any = value.detach()
    if plain_shards:
        return plainly_sharded(shown, mesh)
    return shown if mesh is None else on_larger_mesh(shown, mesh)
