"""``patch_torch``: our names where PyTorch has its own, until that is undone."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple, Self

from fullshard.comm import Public, choose_wire
from fullshard.compat.handles import policy_for_param, state_of
from fullshard.compat.names import OURS, is_ours, keeps_torchs
from fullshard.engine import MixedPrecisionPolicy
from fullshard.frontend import fully_shard

Namespace = dict[str, Any]
"""The names of a module."""

_ABSENT = object()


class Patch:
    """What ``patch_torch`` returns: undo it, or let a ``with`` block do so at its end."""

    def __init__(self) -> None:
        self._undone = False

    def undo(self) -> None:
        """Put PyTorch's names back, if no other patch is still wanted; once is enough."""
        if not self._undone:
            self._undone = True
            _release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def patch_torch() -> Patch:
    """Let programs written for ``torch.distributed.fsdp`` run on fullshard.

    Until it is undone our names stand where PyTorch has its own, also in modules that imported
    them before, and what is sharded communicates by the functions of ``torch.distributed``, as
    PyTorch's FSDP2 does. Call it on all ranks.

        patch_torch()                  # to the end of the process, or
        with patch_torch():            # to the end of the block
            ...

    Modules that were sharded in between go on working afterwards. Calls may be nested.
    """
    _acquire()
    return Patch()


class _Change(NamedTuple):
    """One name of one namespace."""

    namespace: Namespace
    name: str
    theirs: object
    ours: object

    def undo(self) -> None:
        """Put back what was there, unless somebody has put something else since."""
        if self.namespace.get(self.name, _ABSENT) is not self.ours:
            return
        if self.theirs is _ABSENT:
            del self.namespace[self.name]
        else:
            self.namespace[self.name] = self.theirs


class _Patched:
    """PyTorch, patched; several calls share it."""

    def __init__(self) -> None:
        self.num_wanted = 0
        listed = list(_listed())
        self._theirs_of = {id(change.ours): change.theirs for change in listed}
        # Who has our names of his own keeps them. The namespaces are held, as ids are used again.
        self._before = [space for _, space in _modules_but(keeps_torchs)]
        self._held = set(_places(self._before, self._theirs_of))
        ours_of = {id(change.theirs): change.ours for change in listed}
        self._changes = [
            *listed,
            *_changes(self._before, ours_of),
            _Change(vars(fully_shard), "state", _ABSENT, state_of),
        ]
        for change in self._changes:
            change.namespace[change.name] = change.ours
        MixedPrecisionPolicy._resolve_for_param = policy_for_param  # type: ignore[attr-defined]
        self._wire = choose_wire(Public)

    def undo(self) -> None:
        """Put everything back, also in modules that were imported meanwhile."""
        choose_wire(self._wire)
        del MixedPrecisionPolicy._resolve_for_param  # type: ignore[attr-defined]
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
                    space[change.name] = change.ours  # which are PyTorch's here


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


def _listed() -> Iterator[_Change]:
    """What ``OURS`` says, as far as this version of PyTorch has it."""
    for module, names in OURS.items():
        with suppress(ImportError):
            space = vars(import_module(module))
            for name, ours in names.items():
                if name in space:
                    yield _Change(space, name, space[name], ours)


def _modules_but(left_out: Callable[[str], bool]) -> list[tuple[ModuleType, Namespace]]:
    """Modules and what stands in them; read in a way that loads no lazy one."""
    return [
        (module, object.__getattribute__(module, "__dict__"))
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and not left_out(name)
    ]


def _places(spaces: list[Namespace], objects: dict[int, object]) -> Iterator[tuple[int, str]]:
    """Where one of ``objects``, by their ids, stands."""
    for space in spaces:
        for name, value in list(space.items()):
            if id(value) in objects:
                yield id(space), name


def _changes(spaces: list[Namespace], instead_of: dict[int, object]) -> Iterator[_Change]:
    """To put ``instead_of[id(x)]`` wherever x stands."""
    for space in spaces:
        for name, value in list(space.items()):
            if id(value) in instead_of:
                yield _Change(space, name, value, instead_of[id(value)])


def _names_from_fullshard(module: ModuleType) -> set[str]:
    """Names that the source of ``module`` imports from us; "*" if that may be any."""
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
