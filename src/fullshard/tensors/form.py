"""The face of a bucket: how local shards of parameters and of gradients are shown to the user."""

from __future__ import annotations

import enum
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from fullshard._torch import autograd as _autograd
from fullshard._torch import dtensor as _dtensor
from fullshard._torch import memory as _memory
from fullshard.errors import ProtocolError
from fullshard.tensors.parallel import ShardPlace
from fullshard.tensors.uses import raise_explained


def local_part(shown: Tensor) -> Tensor:
    """Return the local tensor of a DTensor (not a view of it); return a plain tensor as it is."""
    return _dtensor.local_of(shown) if isinstance(shown, DTensor) else shown


def local_parts(shown: Sequence[Tensor]) -> list[Tensor]:
    """Return ``local_part`` of each tensor, in one pass in C."""
    return list(_dtensor.locals_or_plain(shown))


def shown_like(shown: Tensor, local: Tensor) -> Tensor:
    """Return ``local``, shaped as ``local_part(shown)``, in the form of ``shown``; no copy."""
    return _dtensor.dtensor_like(shown, local) if isinstance(shown, DTensor) else local


class Shown(enum.Enum):
    """The form in which users see their parameters between steps."""

    DTENSORS = "DTensors"
    """New DTensors replace the parameters: ``fully_shard``."""
    ORIGINALS = "originals"
    """The user's own Parameter objects, over this rank's plain piece:
    ``FullyShardedDataParallel(use_orig_params=True)``."""
    FLAT = "flat"
    """One plain Parameter over the whole shard; the pieces are hidden:
    ``FullyShardedDataParallel(use_orig_params=False)``."""


@dataclass(frozen=True)
class Face:
    """The tensors by which users see the local shards of some parameters, and their gradients.

    ``index`` numbers the parameters, each with its global shape and place. DTensors are of class
    ``cls``; plain tensors are the user's own Parameter objects, each over a local shard.
    """

    shapes: Sequence[torch.Size]
    places: Sequence[ShardPlace]
    cls: type[DTensor] = DTensor
    shown: Shown = Shown.DTENSORS
    _specs: dict[tuple[int, torch.dtype], _dtensor.DTensorSpec] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """True if users see plain tensors."""
        return self.shown is not Shown.DTENSORS

    def parameter(self, index: int, local: Tensor, original: nn.Parameter) -> nn.Parameter:
        """Return the parameter over ``local`` that replaces ``original``, perhaps itself.

        A new parameter has the ``requires_grad`` and, as a DTensor, ``grad_dtype`` of ``original``.
        """
        if self.is_plain and not isinstance(original, DTensor):  # which cannot hold plain data
            original.grad = None  # has the full shape; PyTorch refuses a gradient of another shape
            original.data = local
            return original
        param = nn.Parameter(self.wrap(index, local), requires_grad=original.requires_grad)
        if not self.is_plain:
            _autograd.keep_grad_dtype(_autograd.explicit_grad_dtype(original), param)
        return param

    def wrap(self, index: int, local: Tensor) -> Tensor:
        """Return the tensor that shows ``local`` to the user; both share storage."""
        if self.shown is not Shown.DTENSORS:
            return local
        spec = self._specs.get((index, local.dtype)) or self._new_spec(index, local.dtype)
        return _dtensor.dtensor_from_spec(local, spec, requires_grad=False, cls=self.cls)

    def _new_spec(self, index: int, dtype: torch.dtype) -> _dtensor.DTensorSpec:
        """Return the spec with the global shape and the stride of a contiguous tensor."""
        shape, place = self.shapes[index], self.places[index]
        placements = tuple(place.placements)
        spec = _dtensor.dtensor_spec(place.mesh, placements, shape=shape, dtype=dtype)
        self._specs[index, dtype] = spec
        return spec

    def local(self, shown: Tensor) -> Tensor:
        """Return the local tensor behind ``shown``, itself and not a view.

        That of a plain parameter is detached from the parameter's autograd history.
        """
        if self.shown is Shown.DTENSORS:
            return _dtensor.local_of(cast("DTensor", shown))
        return shown.data

    def repoint(self, shown: Tensor, local: Tensor) -> None:
        """Make ``shown`` show another local tensor of the same shape and dtype."""
        if self.is_plain:
            shown.data = local
        else:
            _dtensor.repoint(cast("DTensor", shown), local)

    def introduce(self, index: int, shown: Tensor) -> None:
        """Announce the place of ``shown``, perhaps a new object; a DTensor carries its place."""
        if self.is_plain:
            place, full_shape = self.places[index], self.shapes[index]
            announce_pieces(shown, [PlacedPiece(place, 0, shown.numel(), full_shape)])

    def all_show(self, shown: Sequence[Tensor], locals_: Sequence[Tensor]) -> bool:
        """Return whether each of ``shown`` still shows its local tensor."""
        if self.shown is Shown.DTENSORS:
            return all(map(is_, _dtensor.locals_of(shown), locals_))
        return all(map(_shares_memory, shown, locals_))

    def as_dtensor(self, index: int, local: Tensor) -> Tensor:
        """Return ``local``, laid out like the local shard, as a DTensor for state dicts.

        If nothing is cut, the DTensor has the shape of the parameter.
        """
        full_shape = self.shapes[index]
        is_full = local.shape != full_shape and local.numel() == full_shape.numel()
        local = local.view(full_shape) if is_full and self.cls is DTensor else local
        return replace(self, shown=Shown.DTENSORS).wrap(index, local)

    def __str__(self) -> str:
        if self.is_plain:
            return "plain pieces"
        if self.cls is not DTensor:
            return f"{self.cls.__name__}s"
        kinds = dict.fromkeys(", ".join(map(str, place.placements)) for place in self.places)
        return " and ".join(kinds)


def _shares_memory(shown: Tensor, local: Tensor) -> bool:
    """Return whether two plain tensors are alike and share memory.

    Empty tensors all have one address, but storages of their own.
    """
    alike = (shown.shape, shown.dtype, shown.device) == (local.shape, local.dtype, local.device)
    if not alike or shown.is_meta:
        return alike
    if shown.numel() == 0:
        return _memory.shares_storage(shown, local)
    return shown.data_ptr() == local.data_ptr()


class PlacedPiece(NamedTuple):
    """Some elements of a plain Parameter, and of the Parameter's gradient, that share one place.

    Attributes:
        place: the mesh and placements of the elements.
        start: index of the first element, in 1-D.
        numel: number of elements.
        full_shape: shape of the parameter that has these elements; None in a flat parameter, which
            has elements of several.
    """

    place: ShardPlace
    start: int
    numel: int
    full_shape: torch.Size | None = None


_pieces: MutableMapping[Tensor, tuple[PlacedPiece, ...]] = WeakIdKeyDictionary()


def announce_pieces(param: Tensor, pieces: Sequence[PlacedPiece]) -> None:
    """Announce the ``pieces`` of ``param``, for ``placed_pieces_of``, without keeping it alive."""
    _pieces[param] = tuple(pieces)


def placed_pieces_of(param: Tensor) -> tuple[PlacedPiece, ...]:
    """Return the pieces that were announced for ``param``; an empty tuple if none were."""
    return _pieces.get(param, ())


class AbsentParameter(Tensor):
    """A tensor without memory, with shape, dtype and device, that refuses every operation.

    PyTorch's FSDP1 leaves views of freed memory in such places, whose dtype programs read.
    """

    whose: str
    """The name of the parameter."""

    @classmethod
    def of(
        cls,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool,
    ) -> AbsentParameter:
        """Return the stand-in of the parameter with this name and these properties."""
        absent = _memory.wrapper_of(cls, torch.empty(shape, dtype=dtype, device="meta"), device)
        absent.requires_grad = requires_grad
        absent.whose = name
        return absent

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        """Refuse."""
        names = ", ".join(one.whose for one in args if isinstance(one, cls))
        error = ProtocolError(
            f"{op} of {names or 'parameters'}: it is part of a flat parameter, and has no memory "
            "outside of the forward and backward of its wrapper; use it inside of "
            "FullyShardedDataParallel.summon_full_params(), or wrap with use_orig_params=True"
        )
        raise_explained((args, kwargs), error)
        raise error

    def __repr__(self) -> str:  # type: ignore[override]
        """Describe it without its elements."""
        return f"AbsentParameter({self.whose}, {tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: object) -> AbsentParameter:
        """Return itself, because nothing in it changes."""
        return self

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., AbsentParameter], Any]:
        """Pickle what there is."""
        given = (self.whose, self.shape, self.dtype, self.device, self.requires_grad)
        return AbsentParameter.of, given


WRAPPED = "_fsdp_wrapped_module"
"""The attribute of ``FullyShardedDataParallel`` for the module inside, so a part of names."""

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", f"{WRAPPED}.")


def clean_name(name: str) -> str:
    """Return ``name`` without what wrappers add: activation checkpoints, the compiler, ours."""
    for prefix in _WRAPPERS:
        name = name.replace(prefix, "")
    return name
