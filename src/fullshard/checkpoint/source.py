"""Where loaded values come from: a dictionary on every rank, or the first rank's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard.comm import broadcast_from_first, broadcast_object_from_first
from fullshard.errors import ConfigError

Key = str | tuple[str, str]
"""A name of the model's state dict, or the name of a parameter and what the optimizer keeps."""


class _Announced(NamedTuple):
    """A tensor that will come."""

    shape: torch.Size
    dtype: torch.dtype
    is_dtensor: bool
    number: Tensor | None
    """The value itself of a tensor without dims, such as a step count, which stays on the CPU."""


class Source:
    """Values by key. Ranks agree on what is there before one value is asked for.

    With a ``mesh`` the first rank's values come to all of its ranks, which ask for all of them in
    the same order, one whole tensor at a time.
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
        """Of a tensor; None for anything else."""
        announced = self.announced[key]
        return announced.shape if isinstance(announced, _Announced) else None

    def get(self, key: Key) -> Any:
        """The value; a collective with a mesh."""
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
    return _Announced(value.shape, value.dtype, is_dtensor, number)
