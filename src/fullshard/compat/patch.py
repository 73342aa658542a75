"""Replace PyTorch's FSDP names with ours until the patch is undone: ``patch_torch``."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from itertools import groupby
from types import ModuleType
from typing import Any, NamedTuple, Self

from fullshard.comm import Public, choose_wire
from fullshard.compat.accelerate_cpu import ShardsOnCpus
from fullshard.compat.ineffective import IneffectivePatches
from fullshard.compat.names import (
    ATTRIBUTES,
    BUILT_ON_SHOWN,
    OURS,
    SHOWN,
    is_ours,
    keeps_torchs,
)
from fullshard.compat.shown import Pair, Showing
from fullshard.frontend.build import before_sharding

Namespace = dict[str, Any]
"""The ``__dict__`` of a module or of a function."""


class Patch:
    """A handle that undoes ``patch_torch``, by ``undo`` or at the end of a ``with`` block."""

    def __init__(self) -> None:
        self._undone = False

    def undo(self) -> None:
        """Restore PyTorch's names unless another patch is active; repeated calls do nothing."""
        if not self._undone:
            self._undone = True
            _release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def patch_torch() -> Patch:
    """Make programs written for ``torch.distributed.fsdp`` run on fullshard.

    Until the patch is undone, our names replace PyTorch's, also in modules that imported PyTorch's
    names earlier, and sharded modules communicate through the functions of ``torch.distributed``,
    as in PyTorch's FSDP2. Call ``patch_torch`` on all ranks.

        patch_torch()                  # to the end of the process, or
        with patch_torch():            # to the end of the block
            ...

    Modules that were sharded under the patch keep working after it. Calls may be nested.
    """
    _acquire()
    return Patch()


class _Change(NamedTuple):
    """A replacement of one name in one namespace."""

    namespace: Namespace
    name: str
    theirs: object
    ours: object

    def undo(self) -> None:
        """Restore the old object, unless the name has been changed again since."""
        if self.namespace.get(self.name) is self.ours:
            self.namespace[self.name] = self.theirs


class _Patched:
    """The patch of PyTorch, which nested calls of ``patch_torch`` share."""

    def __init__(self) -> None:
        self.num_wanted = 0
        for name in BUILT_ON_SHOWN:
            with suppress(ImportError):
                import_module(name)
        listed, shown = list(_listed(OURS)), list(_listed(SHOWN))
        self._theirs_of = {id(change.ours): change.theirs for change in (*listed, *shown)}
        # Names that held our objects before keep them. ``_before`` keeps the namespaces' ids valid.
        self._before = [space for _, space in _modules_but(keeps_torchs)]
        self._held = set(_places(self._before, self._theirs_of))
        ours_of = {id(change.theirs): change.ours for change in (*listed, *shown)}
        self._changes = [
            *listed,
            *_changes(self._before, ours_of),
        ]
        for change in self._changes:
            change.namespace[change.name] = change.ours
        self._showing = [
            Showing(import_module(name), {c.name: Pair(c.theirs, c.ours) for c in changes})
            for name, changes in groupby(shown, key=lambda change: change.namespace["__name__"])
        ]
        for attribute in ATTRIBUTES:
            setattr(attribute.of, attribute.name, attribute.value)
        self._wire = choose_wire(Public)
        self._accelerate = ShardsOnCpus()
        self._look = IneffectivePatches().warn
        before_sharding.append(self._look)

    def undo(self) -> None:
        """Restore everything, also in modules that were imported during the patch."""
        before_sharding.remove(self._look)
        self._accelerate.undo()
        choose_wire(self._wire)
        for attribute in ATTRIBUTES:
            delattr(attribute.of, attribute.name)
        for showing in self._showing:
            showing.undo()
        for change in self._changes:
            change.undo()
        for module, space in _modules_but(is_ours):
            late = [
                change
                for change in _changes([space], self._theirs_of)
                if (id(space), change.name) not in self._held
            ]
            own = _names_from_fullshard(module) if late else set()
            for change in late:
                if not own & {change.name, "*"}:
                    space[change.name] = change.ours  # PyTorch's object in these reversed changes


_patched: _Patched | None = None


def _acquire() -> None:
    global _patched
    if _patched is None:
        _patched = _Patched()
    _patched.num_wanted += 1


def _release() -> None:
    global _patched
    assert _patched is not None
    _patched.num_wanted -= 1
    if not _patched.num_wanted:
        patched, _patched = _patched, None
        patched.undo()


def _listed(table: dict[str, dict[str, object]]) -> Iterator[_Change]:
    """Yield the changes of ``table`` for names that this version of PyTorch has."""
    for module, names in table.items():
        with suppress(ImportError):
            space = vars(import_module(module))
            for name, ours in names.items():
                if name in space:
                    yield _Change(space, name, space[name], ours)


def _modules_but(left_out: Callable[[str], bool]) -> list[tuple[ModuleType, Namespace]]:
    """Return modules and their namespaces, read in a way that loads no lazy module."""
    return [
        (module, object.__getattribute__(module, "__dict__"))
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and not left_out(name)
    ]


def _places(spaces: list[Namespace], objects: dict[int, object]) -> Iterator[tuple[int, str]]:
    """Yield (id of the namespace, name) for every name of one of ``objects``, keyed by id."""
    for space in spaces:
        for name, value in list(space.items()):
            if id(value) in objects:
                yield id(space), name


def _changes(spaces: list[Namespace], instead_of: dict[int, object]) -> Iterator[_Change]:
    """Yield the changes that replace x with ``instead_of[id(x)]`` in every place."""
    for space in spaces:
        for name, value in list(space.items()):
            if id(value) in instead_of:
                yield _Change(space, name, value, instead_of[id(value)])


def _names_from_fullshard(module: ModuleType) -> set[str]:
    """Return the names that the source of ``module`` imports from us; "*" for a star import."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return set()
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fullshard"
        for alias in node.names
    }
