"""The rows of a state dict: parameters and buffers, their names and their sharing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard._torch import dtensor as _dtensor
from fullshard.comm import broadcast_from_first, broadcast_object_from_first
from fullshard.engine import Unit
from fullshard.errors import ConfigError
from fullshard.frontend.contexts import (
    full_held,
    full_value,
    is_first_rank,
    named_sharded,
    units_at_rest,
)
from fullshard.frontend.hooks import engine_of
from fullshard.frontend.places import Held, held_params
from fullshard.frontend.sharded import state_dict_as_it_is
from fullshard.layout.region import Region, full_region
from fullshard.tensors import is_on_one_rank, on_larger_mesh, plainly_sharded, region_of
from fullshard.tensors.form import clean_name
from fullshard.tensors.parts import coordinate_in

Key = str | tuple[str, str]
"""A name in a model's state dict, or a parameter's name and the name of its optimizer state."""


class Announced(NamedTuple):
    """The description of a value to load, which may be with another rank or in a file."""

    shape: torch.Size | None
    """None: the value is no tensor."""
    dtype: torch.dtype | None = None
    is_dtensor: bool = False
    is_on_one_rank: bool = False
    value: Any = None
    """The value itself if it is no tensor, or a tensor without dims, such as a step count."""

    @classmethod
    def of(cls, value: Any) -> Announced:
        """Describe ``value``."""
        if not isinstance(value, Tensor):
            return cls(None, value=value)
        if isinstance(value, DTensor):
            return cls(value.shape, value.dtype, True, is_on_one_rank(value.placements))
        return cls(value.shape, value.dtype, value=None if value.dim() else value.detach().cpu())


class Source:
    """The values to load, by key.

    With a ``mesh`` they are the values of its first rank. The constructor broadcasts their
    descriptions, and each ``get`` broadcasts one tensor, so ranks get the same keys in one order.
    """

    def __init__(
        self, values: Mapping[Key, Any], *, mesh: DeviceMesh | None, device: torch.device
    ) -> None:
        self._values = values
        self._mesh = mesh
        self._device = device
        self.announced = {key: Announced.of(value) for key, value in values.items()}
        if mesh is None:
            return
        self.announced = broadcast_object_from_first(self.announced, mesh)
        if any(one.is_dtensor for one in self.announced.values()):
            raise ConfigError(
                "broadcast_from_rank0=True: rank 0 gave DTensors, expected full plain tensors; "
                "load sharded state on every rank"
            )

    def get(self, key: Key) -> Any:
        """Return the value of ``key``; a collective if there is a mesh."""
        if self._mesh is None:
            return self._values[key]
        announced = self.announced[key]
        if announced.shape is None or announced.value is not None:
            return announced.value
        own = self._values.get(key)
        if isinstance(own, Tensor) and not any(self._mesh.get_coordinate() or ()):
            value = own.detach().to(self._device).contiguous()
        else:
            value = torch.empty(announced.shape, dtype=announced.dtype, device=self._device)
        broadcast_from_first(value, self._mesh)
        return value


EXTRA_STATE = "_extra_state"
"""The end of the names that modules give to their extra state."""


class Row(NamedTuple):
    """An entry of a state dict of a model or of an optimizer."""

    name: str
    """Name of the parameter or buffer, without the prefixes of wrappers."""
    value: Any
    """The parameter or buffer itself, a value of optimizer state, or extra state of a module;
    a DTensor if ranks hold parts of the tensor."""
    held: Held | None = None
    """The position of the parameter in a unit, if a unit owns the parameter."""
    own_name: str = ""
    """The name in ``module.state_dict()``."""
    key: str = ""
    """The optimizer's name of the state, such as "exp_avg"; empty in rows of a model."""

    @property
    def is_free(self) -> bool:
        """True for what may have any type and shape: extra state of a module, and no tensors."""
        return not isinstance(self.value, Tensor) or self.name.endswith(EXTRA_STATE)

    @property
    def identity(self) -> object:
        """Equal for tied parameters, of which one name is enough."""
        return self.name if self.is_free else id(self.value)


class Tree:
    """A sharded model between steps.

    Raises:
        ProtocolError: during a forward or a backward; if parameters are on meta, unless
            ``without_values`` is set; or if parameters are lent, unless ``may_be_lent`` is set.
            With ``may_be_lent``, rows hold the lent parameters, which no unit owns.

    Attributes:
        module: the model.
        units: its units.
        held: the parameters that units own, by their ``id``.
    """

    def __init__(
        self,
        module: nn.Module,
        what: str,
        *,
        without_values: bool = False,
        may_be_lent: bool = False,
    ) -> None:
        self.module = module
        self.units: list[Unit] = units_at_rest(
            module, what, without_values=without_values, may_be_lent=may_be_lent
        )
        self.held = {id(held.param): held for held in held_params(self.units).values()}
        self._shown: dict[Held, Tensor] = {}

    def rows(self) -> Iterator[Row]:
        """Yield all entries of the state dict, in the order of the unsharded model's."""
        own = state_dict_as_it_is(self.module, self.units)
        names = {clean_name(name) for name in own}
        if len(names) < len(own):
            raise ConfigError(
                "state dict: two names are one without the prefixes of wrappers: "
                f"{sorted(own)[:8]}; rename a module"
            )
        for name, value in own.items():
            held = self.held.get(id(value))
            shown = value if held is None else self.shown(held)
            yield Row(clean_name(name), shown, held, own_name=name)

    def shown(self, held: Held) -> Tensor:
        """Return a sharded parameter as a DTensor, the same object at every call."""
        if held not in self._shown:
            self._shown[held] = held.as_dtensor()
        return self._shown[held]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield clean names and parameters; sharded ones as ``shown``, tied ones only once."""
        for name, param, held in named_sharded(self.module, self.units):
            yield name, param if held is None else self.shown(held)

    @property
    def is_first(self) -> bool:
        """Return whether this rank is the first of all ranks that hold the model."""
        return is_first_rank(self.units)

    @property
    def mesh(self) -> DeviceMesh | None:
        """The largest mesh of any sharded parameter; None if there is no such parameter."""
        shown: list[Any] = [self.shown(held) for held in self.held.values()]
        meshes = [param.device_mesh for param in shown]
        return max({id(mesh): mesh for mesh in meshes}.values(), key=_extent, default=None)

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes; the CPU if nothing is sharded."""
        return self.units[0].device if self.units else torch.device("cpu")

    @property
    def is_lent_elsewhere(self) -> bool:
        """Return whether another rank has full parameters on loan, and this one has not."""
        lendings = [unit.lending for unit in self.units if unit.lending is not None]
        return any(not lending.is_shown for lending in lendings)

    def rewritten(self) -> None:
        """Tell the engines that sharded parameters have new values."""
        for unit in self.units:
            if not unit.is_lent:  # else that is told when the loan ends
                engine_of(unit).rewritten(unit)

    def check_complete(self, what: str) -> None:
        """Raise ``TornStepError`` if an interrupted optimizer step left weights partly updated."""
        for unit in self.units:
            engine_of(unit).steps.check_complete(what)

    def forget_interrupted(self) -> None:
        """Clear the records of interrupted steps: all ranks know what became of the weights."""
        for unit in self.units:
            engine_of(unit).forget_interrupted(unit)


def _extent(mesh: DeviceMesh) -> tuple[int, int, bool]:
    """Return a sort key: size, number of dims, then whether ranks are in ascending order."""
    ranks = mesh.mesh.flatten().tolist()
    return mesh.size(), mesh.ndim, ranks == sorted(ranks)


def full(
    tree: Tree, rows: Sequence[Row], *, rank0_only: bool, cpu: bool, copies: bool = True
) -> Iterator[tuple[Row, Any]]:
    """Yield each row with its full value, gathered one at a time; a collective.

    With ``rank0_only`` all ranks take part in gathering, but only the first rank yields. Tied
    parameters of a model share one full tensor. Without ``copies``, tensors that need not be
    gathered are not cloned.
    """
    is_given = not rank0_only or tree.is_first
    seen: dict[int, Any] = {}
    for row in rows:
        number = id(row.value)
        if row.key or number not in seen:
            full = row.value
            if row.held is not None:
                full = full_held(row.held, rank0_only=rank0_only)
            elif isinstance(full, Tensor):
                full = full_value(row.value)
                if copies and not isinstance(row.value, DTensor):
                    full = full.clone()
            on_cpu = cpu and is_given and isinstance(full, Tensor)
            seen[number] = full.cpu() if on_cpu else full if is_given else None
        if is_given:
            yield row, seen[number]


def sharded(
    rows: Iterable[Row], mesh: DeviceMesh | None, *, plain_shards: bool
) -> Iterator[tuple[Row, Any]]:
    """Yield each row with its value for a sharded state dict, which shares the live memory.

    Args:
        rows: rows of a model or of an optimizer.
        mesh: put DTensors on this mesh if that takes no communication; None: their own mesh.
        plain_shards: gather, and cut again, DTensors not placed by ``Shard`` and ``Replicate``.
    """
    for row in rows:
        value = row.value.detach() if isinstance(row.value, Tensor) else row.value
        if isinstance(value, DTensor) and plain_shards:
            value = plainly_sharded(value, mesh)
        elif isinstance(value, DTensor) and mesh is not None:
            value = on_larger_mesh(value, mesh)
        yield row, value


def part_here(value: Tensor) -> tuple[Tensor, Region]:
    """Return what this rank holds of a tensor of the model, and which elements these are."""
    if not isinstance(value, DTensor):
        return value.detach(), full_region(value.shape)
    mesh = value.device_mesh
    region = region_of(value.shape, value.placements, mesh.shape, coordinate_in(mesh))
    return _dtensor.local_of(value), region
