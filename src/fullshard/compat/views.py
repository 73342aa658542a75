"""The base of read-only views, which stand for objects of PyTorch's private classes."""

from __future__ import annotations

from typing import Any, ClassVar

from fullshard.errors import UnsupportedError

_TABLE = "docs/compat.md lists what there is under private names"


class _Absent(UnsupportedError, AttributeError):
    """An error for ``hasattr`` and ``getattr`` with a default, by which programs ask for names."""


class View:
    """A view of our engine under the attribute names of a private class of PyTorch's.

    It passes ``isinstance`` with that class, which itself stays in place, because PyTorch's own
    ``replicate`` builds on it. It has facts to read and nothing to write. Names in ``instead``
    raise for every way of asking: programs that want these would go wrong without.
    """

    stands_for: ClassVar[type]
    """The class of PyTorch's."""
    instead: ClassVar[dict[str, str]] = {}
    """Names of PyTorch's class that cannot be true here -> what to use."""

    _of: tuple[Any, ...]

    def __init__(self, *of: object) -> None:
        object.__setattr__(self, "_of", of)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self.stands_for

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._of == self._of

    def __hash__(self) -> int:
        return hash((type(self), self._of))

    def __getattr__(self, name: str) -> Any:
        """Refuse what is not here."""
        what = f"{self.stands_for.__name__}.{name} of a module that fullshard shards"
        if name in self.instead:
            raise UnsupportedError(f"{what}: there is none; use {self.instead[name]}")
        raise _Absent(f"{what}: there is none; {_TABLE}")

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse all writes."""
        raise UnsupportedError(
            f"{self.stands_for.__name__}.{name} = {value!r}: states of modules that fullshard "
            f"shards can only be read; use {self.instead.get(name, 'the methods of the module')}"
        )
