"""Forms: how a rank's piece of a parameter, or of its gradient, is shown to the user.

``DTensorForm`` is that of ``fully_shard``, ``PlainForm`` that of ``FullyShardedDataParallel``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.tensors.parallel import ShardPlace
from fullshard.tensors.pieces import PlacedPart, announce_parts


def local_part(shown: Tensor) -> Tensor:
    """This rank's part of a DTensor, itself and not a view; a plain tensor is its own."""
    return _torch.local_of(shown) if isinstance(shown, DTensor) else shown


def shown_like(shown: Tensor, local: Tensor) -> Tensor:
    """``local``, shaped as ``local_part(shown)`` is, shown as ``shown`` is; they share storage."""
    return _torch.dtensor_like(shown, local) if isinstance(shown, DTensor) else local


class ShardForm(Protocol):
    """Turns local tensors into what the user sees, and back; ``index`` is the parameter's."""

    def parameter(self, index: int, local: Tensor, original: nn.Parameter) -> nn.Parameter:
        """What stands for ``original`` from now on, over ``local``; perhaps itself."""

    def wrap(self, index: int, local: Tensor) -> Tensor:
        """Show ``local``; they share storage."""

    def local(self, shown: Tensor) -> Tensor:
        """The local tensor behind ``shown``, itself."""

    def repoint(self, shown: Tensor, local: Tensor) -> None:
        """Let ``shown`` stand for another local tensor of the same shape and dtype."""

    def introduce(self, index: int, shown: Tensor) -> None:
        """Let it be known where ``shown``, which may be another object than before, lies."""

    def stands_for(self, shown: Tensor, local: Tensor) -> bool:
        """Whether ``shown`` is still around ``local``."""

    def as_dtensor(self, index: int, local: Tensor) -> Tensor:
        """``local``, laid out like the parameter's piece, as a DTensor, for state dicts."""

    def __str__(self) -> str:
        """How parameters lie, for people."""


@dataclass(frozen=True)
class DTensorForm:
    """DTensors of class ``cls`` with the parameters' global ``shapes``, at these ``places``."""

    shapes: Sequence[torch.Size]
    places: Sequence[ShardPlace]
    cls: type[DTensor] = DTensor
    _specs: dict[tuple[int, torch.dtype], _torch.DTensorSpec] = field(default_factory=dict)

    def parameter(self, index: int, local: Tensor, original: nn.Parameter) -> nn.Parameter:
        """A new one."""
        param = nn.Parameter(self.wrap(index, local), requires_grad=original.requires_grad)
        _torch.keep_grad_dtype(_torch.explicit_grad_dtype(original), param)
        return param

    def wrap(self, index: int, local: Tensor) -> Tensor:
        """A DTensor with global shape and the stride of a contiguous tensor."""
        spec = self._specs.get((index, local.dtype))
        if spec is None:
            shape, place = self.shapes[index], self.places[index]
            spec = self._specs[index, local.dtype] = _torch.dtensor_spec(
                place.mesh,
                tuple(place.placements),
                shape=shape,
                stride=torch.empty(shape, device="meta").stride(),
                dtype=local.dtype,
            )
        return _torch.dtensor_from_spec(local, spec, requires_grad=False, cls=self.cls)

    def local(self, shown: Tensor) -> Tensor:
        """See ``ShardForm``."""
        return _torch.local_of(cast("DTensor", shown))

    def repoint(self, shown: Tensor, local: Tensor) -> None:
        """See ``ShardForm``."""
        _torch.repoint(cast("DTensor", shown), local)

    def introduce(self, index: int, shown: Tensor) -> None:
        """DTensors tell it themselves."""

    def stands_for(self, shown: Tensor, local: Tensor) -> bool:
        """See ``ShardForm``."""
        return _torch.local_of(cast("DTensor", shown)) is local

    def as_dtensor(self, index: int, local: Tensor) -> Tensor:
        """What users see anyway; where nothing is cut, of the parameter's shape."""
        whole = self.shapes[index]
        is_whole = local.shape != whole and local.numel() == whole.numel()
        return self.wrap(index, local.view(whole) if is_whole and self.cls is DTensor else local)

    def __str__(self) -> str:
        if self.cls is not DTensor:
            return f"{self.cls.__name__}s"
        kinds = dict.fromkeys(", ".join(map(str, place.placements)) for place in self.places)
        return " and ".join(kinds)


@dataclass(frozen=True)
class PlainForm:
    """Plain tensors: the user's own Parameter objects, each over this rank's piece."""

    dtensors: DTensorForm

    def parameter(self, index: int, local: Tensor, original: nn.Parameter) -> nn.Parameter:
        """``original`` itself; a DTensor cannot be over a plain piece, so for that a new one."""
        if isinstance(original, DTensor):
            return nn.Parameter(local, requires_grad=original.requires_grad)
        original.grad = None  # of the whole; another shape is refused
        original.data = local
        return original

    def wrap(self, index: int, local: Tensor) -> Tensor:
        """See ``ShardForm``."""
        return local

    def local(self, shown: Tensor) -> Tensor:
        """See ``ShardForm``; without the history that a Parameter has."""
        return shown.data

    def repoint(self, shown: Tensor, local: Tensor) -> None:
        """See ``ShardForm``."""
        shown.data = local

    def introduce(self, index: int, shown: Tensor) -> None:
        """See ``ShardForm``."""
        announce_parts(shown, [PlacedPart(self.dtensors.places[index], 0, shown.numel())])

    def stands_for(self, shown: Tensor, local: Tensor) -> bool:
        """See ``ShardForm``; empty tensors are all in the same place."""
        alike = (shown.shape, shown.dtype, shown.device) == (local.shape, local.dtype, local.device)
        return alike and (shown.is_meta or shown.data_ptr() == local.data_ptr())

    def as_dtensor(self, index: int, local: Tensor) -> Tensor:
        """See ``ShardForm``."""
        return self.dtensors.as_dtensor(index, local)

    def __str__(self) -> str:
        return "plain pieces"
