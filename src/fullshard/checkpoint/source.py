"""Read the values to load from a dictionary on every rank, or from the first rank's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard.comm import broadcast_from_first, broadcast_object_from_first
from fullshard.errors import ConfigError
from fullshard.tensors import is_on_one_rank

Key = str | tuple[str, str]
"""A name in a model's state dict, or a parameter's name and the name of its optimizer state."""


class _Announced(NamedTuple):
    """The description of a tensor that ``Source.get`` returns later."""

    shape: torch.Size
    dtype: torch.dtype
    is_dtensor: bool
    is_on_one_rank: bool
    number: Tensor | None
    """The tensor itself, on the CPU, if it has no dims (such as a step count)."""


class Source:
    """The values to load, by key.

    With a ``mesh`` they are the values of its first rank: the constructor broadcasts what there
    is, ``get`` one whole tensor at a time, so all ranks must get the same keys in the same order.
    """

    def __init__(
        self, values: Mapping[Key, Any], *, mesh: DeviceMesh | None, device: torch.device
    ) -> None:
        self._values = values
        self._mesh = mesh
        self._device = device
        announced = {key: _announce(value) for key, value in values.items()}
        if mesh is not None:
            announced = broadcast_object_from_first(announced, mesh)
        self.announced: dict[Key, Any] = announced
        if mesh is not None and any(
            isinstance(one, _Announced) and one.is_dtensor for one in announced.values()
        ):
            raise ConfigError(
                "broadcast_from_rank0=True: rank 0 gave DTensors, expected whole plain tensors; "
                "load sharded state on every rank"
            )

    def shape_of(self, key: Key) -> torch.Size | None:
        """Return the shape of a tensor; None for any other value."""
        announced = self.announced[key]
        return announced.shape if isinstance(announced, _Announced) else None

    def get(self, key: Key) -> Any:
        """Return the value of ``key``; a collective if there is a mesh."""
        announced = self.announced[key]
        if self._mesh is None:
            return self._values[key]
        if not isinstance(announced, _Announced):
            return announced
        if announced.number is not None:
            return announced.number
        own = self._values.get(key)
        if isinstance(own, Tensor) and self._is_first:
            value = own.detach().to(self._device).contiguous()
        else:
            value = torch.empty(announced.shape, dtype=announced.dtype, device=self._device)
        broadcast_from_first(value, self._mesh)
        return value

    @property
    def _is_first(self) -> bool:
        return self._mesh is not None and not any(self._mesh.get_coordinate() or ())


def _announce(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    is_dtensor = isinstance(value, DTensor)
    number = value.detach().cpu() if value.dim() == 0 and not is_dtensor else None
    on_one = isinstance(value, DTensor) and is_on_one_rank(value.placements)
    return _Announced(value.shape, value.dtype, is_dtensor, on_one, number)
