"""Show our names in a module of PyTorch's whose own functions go on using PyTorch's."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple


class Pair(NamedTuple):
    """PyTorch's object of a name, and ours."""

    theirs: object
    ours: object


class Showing:
    """A module that shows our objects to all who read or import its names, until ``undo``.

    Functions find their globals in the module's dictionary, which keeps PyTorch's objects: the
    modules that PyTorch shards, and its ``replicate``, go on working. So only the class of the
    module object changes, by which Python looks up ``module.name`` and ``from module import name``.
    """

    def __init__(self, module: ModuleType, pairs: Mapping[str, Pair]) -> None:
        self._module, self._cls = module, type(module)
        module.__class__ = _class_with(self._cls, pairs)

    def undo(self) -> None:
        """Show PyTorch's objects again."""
        self._module.__class__ = self._cls


def _class_with(base: type[ModuleType], pairs: Mapping[str, Pair]) -> type[ModuleType]:
    """Return a class of modules that shows ``pairs``, whose keys are names."""

    class ShowingModule(base):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            pair = pairs.get(name)
            return pair.ours if pair is not None and found is pair.theirs else found

        def __setattr__(self, name: str, value: object) -> None:
            # Who puts another object in the place of what was shown puts that back later.
            pair = pairs.get(name)
            is_ours = pair is not None and value is pair.ours
            super().__setattr__(name, pair.theirs if pair is not None and is_ours else value)

    return ShowingModule
