"""Looks PyTorch's private names up at import, so that one that is missing raises only when used.

A module of this package gets the objects that it needs from a ``Private``, and tells it at its end
which attributes its functions read. If one is missing, the functions that read it are replaced. So
calls on a PyTorch that has all names cost nothing.
"""

from __future__ import annotations

import inspect
import pkgutil
import sys
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import torch

from fullshard.errors import TorchVersionError

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


class PrivateName(NamedTuple):
    """A private name of PyTorch that a module of this package uses."""

    name: str
    """The full name, from ``torch`` on."""
    feature: str
    """The feature of fullshard that needs the name."""
    is_needed: bool = False
    """True if uses of the feature raise without the name, False if fullshard goes on without it."""

    def is_missing(self) -> bool:
        """Return whether the installed PyTorch lacks the name."""
        owner, _, attribute = self.name.rpartition(".")
        with suppress(ImportError, AttributeError):
            pkgutil.resolve_name(self.name)
            return False
        with suppress(ImportError, AttributeError):  # objects may get it from their __init__
            return attribute not in pkgutil.resolve_name(owner).__init__.__code__.co_names
        return True

    def refuse(self, *_: object, **__: object) -> NoReturn:
        """Raise an error with the name, the version of PyTorch and the feature.

        Raises:
            TorchVersionError: always.
        """
        raise TorchVersionError(
            f"PyTorch {torch.__version__} has no {self.name}, which fullshard needs for "
            f"{self.feature}; use PyTorch 2.11 to 2.15, or a newer fullshard"
        )


class _Missing(type):
    """A class in place of a missing object: nothing is an instance of it, and other uses raise."""

    use: PrivateName

    def __call__(cls, *_: object, **__: object) -> NoReturn:
        cls.use.refuse()

    def __getattr__(cls, name: str) -> NoReturn:
        cls.use.refuse()


class Private:
    """The private names of PyTorch that one module of this package uses, mostly for ``feature``."""

    def __init__(self, module: str, feature: str) -> None:
        self._module, self._feature = module, feature
        self.uses: list[PrivateName] = []

    def missing(self) -> list[PrivateName]:
        """Return the uses whose name the installed PyTorch lacks: the module's self-test."""
        return [use for use in self.uses if use.is_missing()]

    def get(self, name: str, feature: str | None = None, *, instead: Any = None) -> Any:
        """Return the object ``name``; if it is missing ``instead``, or else a class that raises."""
        use = PrivateName(name, feature or self._feature, is_needed=instead is None)
        self.uses.append(use)
        if not use.is_missing():
            return pkgutil.resolve_name(name)
        return _Missing(use.name, (), {"use": use}) if use.is_needed else instead

    def attributes(
        self, owner: str, names: str, feature: str | None = None, *, instead: Any = None
    ) -> None:
        """Declare attributes of ``owner`` that functions of the module read.

        If one is missing, the functions that read it are replaced by ``instead``, or else raise.
        """
        space = vars(sys.modules[self._module])
        own = [key for key, one in space.items() if getattr(one, "__module__", "") == self._module]
        for name in names.split():
            use = PrivateName(
                f"{owner}.{name}", feature or self._feature, is_needed=instead is None
            )
            self.uses.append(use)
            for key in own if use.is_missing() else ():
                code = getattr(inspect.unwrap(space[key]), "__code__", None)
                if code is not None and name.rpartition(".")[2] in code.co_names:
                    space[key] = instead or use.refuse
