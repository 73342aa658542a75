"""The base of read-only views, which take the place of objects of PyTorch's private classes.

``torch_name`` and ``originals`` give PyTorch's own objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar

import torch

from fullshard.errors import UnsupportedError

_TABLE = "docs/compat.md lists what there is under private names"

originals: dict[object, Any] = {}
"""Our replacement -> the object of PyTorch's that it replaced in the first patch."""


def torch_file(name: str) -> ModuleType | None:
    """Return a module of ``torch.distributed.fsdp``; None if this PyTorch does not have it."""
    with suppress(ImportError):
        return import_module(f"torch.distributed.fsdp.{name}")
    return None


def torch_name(path: str) -> Any:
    """Return an object of ``torch.distributed.fsdp``, imported now: "_flat_param.FlatParamHandle".

    Raises:
        UnsupportedError: if this PyTorch does not have it.
    """
    file, _, name = path.rpartition(".")
    found = getattr(torch_file(file), name, None)
    if found is None:
        raise UnsupportedError(
            f"PyTorch {torch.__version__} has no torch.distributed.fsdp.{path}, so the private "
            "names of PyTorch's FSDP that need it cannot be read; use the public methods of the "
            "module"
        )
    return found


class _Absent(UnsupportedError, AttributeError):
    """An error for ``hasattr`` and ``getattr`` with a default, by which programs ask for names."""


class View:
    """A read-only view of our engine under the attribute names of a private class of PyTorch's.

    A view passes ``isinstance`` with PyTorch's class, which itself stays in place, because
    PyTorch's own ``replicate`` builds on it. Names in ``instead`` raise even for ``hasattr``:
    programs that need these names must fail here.
    """

    stands_for: ClassVar[str]
    """PyTorch's class, as in ``torch_name``."""
    shown: ClassVar[Mapping[str, Callable[..., object]]]
    """Names to read -> functions of the objects that the view was made of."""
    instead: ClassVar[Mapping[str, str]] = {}
    """Names of PyTorch's class that cannot be true here -> what to use."""

    _of: tuple[Any, ...]

    def __init__(self, *of: object) -> None:
        torch_name(self.stands_for)  # raises here instead of in ``isinstance``
        object.__setattr__(self, "_of", of)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return torch_name(self.stands_for)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._of == self._of

    def __hash__(self) -> int:
        return hash((type(self), self._of))

    def __getattr__(self, name: str) -> Any:
        """Return what ``shown`` has under ``name``; refuse other names."""
        if name in self.shown:
            return self.shown[name](*self._of)
        what = f"{self.stands_for.rpartition('.')[2]}.{name} of a module that fullshard shards"
        if name in self.instead:
            raise UnsupportedError(f"{what}: there is none; use {self.instead[name]}")
        raise _Absent(f"{what}: there is none; {_TABLE}")

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse all writes."""
        raise UnsupportedError(
            f"{self.stands_for.rpartition('.')[2]}.{name} = {value!r}: states of modules that "
            "fullshard shards can only be read; use "
            f"{self.instead.get(name, 'the methods of the module')}"
        )
