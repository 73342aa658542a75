"""Replace PyTorch's FSDP names with ours until the patch is undone: ``patch_torch``."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple, Self

from fullshard.comm import Public, choose_wire
from fullshard.compat.accelerate_cpu import ShardsOnCpus
from fullshard.compat.ineffective import IneffectivePatches
from fullshard.compat.names import ATTRIBUTES, BUILT_ON_SHOWN, OURS, SHOWN, is_ours, keeps_torchs
from fullshard.compat.states import originals
from fullshard.frontend.fully_shard import before_sharding

Namespace = dict[str, Any]
"""The ``__dict__`` of a module or of a function."""


class Patch:
    """A handle that undoes ``patch_torch``, by ``undo`` or at the end of a ``with`` block."""

    def __init__(self) -> None:
        global _patched
        _patched = _patched or _Patched()
        _patched.wanted_by.append(self)

    def undo(self) -> None:
        """Restore PyTorch's names unless another patch is active; repeated calls do nothing."""
        global _patched
        if _patched is None or self not in _patched.wanted_by:
            return
        _patched.wanted_by.remove(self)
        if not _patched.wanted_by:
            patched, _patched = _patched, None
            patched.undo()

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
        self.wanted_by: list[Patch] = []
        for name in BUILT_ON_SHOWN:
            with suppress(ImportError):
                import_module(name)
        listed, shown = list(_listed(OURS)), list(_listed(SHOWN))
        for change in (*listed, *shown):
            originals.setdefault(change.ours, change.theirs)
        self._theirs_of = {id(change.ours): change.theirs for change in (*listed, *shown)}
        # Names that held our objects before keep them. ``_before`` keeps the namespaces' ids valid.
        self._before = [space for _, space in _modules_but(keeps_torchs)]
        held = _changes(self._before, self._theirs_of)
        self._held = {(id(change.namespace), change.name) for change in held}
        ours_of = {id(change.theirs): change.ours for change in (*listed, *shown)}
        changes = [*listed, *_changes(self._before, ours_of)]
        self._undo = ExitStack()
        for change in changes:
            change.namespace[change.name] = change.ours
            self._undo.callback(change.undo)
        showing = dict.fromkeys(change.namespace["__name__"] for change in shown)
        for module in map(import_module, showing):
            here = {change.name: change for change in shown if change.namespace is vars(module)}
            self._undo.callback(setattr, module, "__class__", type(module))
            module.__class__ = _showing(type(module), here)
        for holder, name, value in ATTRIBUTES:
            setattr(holder, name, value)
            self._undo.callback(delattr, holder, name)
        self._undo.callback(choose_wire, choose_wire(Public))
        self._undo.callback(ShardsOnCpus().undo)
        look = IneffectivePatches().warn
        before_sharding.append(look)
        self._undo.callback(before_sharding.remove, look)

    def undo(self) -> None:
        """Restore everything, also in modules that were imported during the patch."""
        self._undo.close()
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


def _changes(spaces: list[Namespace], instead_of: dict[int, object]) -> Iterator[_Change]:
    """Yield the changes that replace x with ``instead_of[id(x)]`` in every place."""
    for space in spaces:
        for name, value in list(space.items()):
            if id(value) in instead_of:
                yield _Change(space, name, value, instead_of[id(value)])


def _showing(base: type[ModuleType], changes: Mapping[str, _Change]) -> type[ModuleType]:
    """Return a class whose modules show our objects to all who read or import their names.

    Functions find their globals in the module's dictionary, which keeps PyTorch's objects, so the
    modules that PyTorch sharded, and its ``replicate``, go on working. Only the class of the module
    object changes, by which Python looks up ``module.name`` and ``from module import name``.
    """

    class ShowingModule(base):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            change = changes.get(name)
            return change.ours if change is not None and found is change.theirs else found

        def __setattr__(self, name: str, value: object) -> None:
            # A program that replaces a name for a while puts back what it read, which was ours.
            if name in changes and value is changes[name].ours:
                value = changes[name].theirs
            super().__setattr__(name, value)

    return ShowingModule


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
