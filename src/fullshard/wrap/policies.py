"""Policies that decide whether a module becomes a unit.

A policy is an object with ``choose``, or a function that is called for each module while the model
is traversed: ``policy(module=..., recurse=..., nonwrapped_numel=...)``. With ``recurse=True`` the
call asks whether modules inside ``module`` may become units; after these modules, a call with
``recurse=False`` asks whether ``module`` itself becomes a unit. ``nonwrapped_numel`` counts the
elements of the module's parameters, in the second call without parameters of units inside the
module. Bind further arguments with ``functools.partial``.

``wrap`` and ``enable_wrap`` mark units while a model is constructed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

from torch import nn

from fullshard.errors import ArgumentTypeError, AssertedConfigError, UnsupportedError

Options = dict[str, Any]  # options of one unit that differ from the model's
PolicyFn = Callable[..., bool]
Classes = Collection[type[nn.Module]]


@runtime_checkable
class Policy(Protocol):
    """A policy that examines a whole model."""

    def choose(self, root: nn.Module, ignored: Collection[nn.Module]) -> dict[nn.Module, Options]:
        """Return the modules of ``root``, without ``ignored``, that become units, with options."""


PolicyLike = Policy | PolicyFn


class ModuleWrapPolicy:
    """A policy, also callable as a function policy, that makes instances of some classes units."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        """Take ``module_classes``, whose instances, also of subclasses, become units.

        Raises:
            ArgumentTypeError: if ``module_classes`` is not an iterable of classes.
        """
        given: Any = module_classes
        is_one = isinstance(given, type)
        classes = tuple(dict.fromkeys(given)) if isinstance(given, Iterable) else (given,)
        if is_one or not all(isinstance(one, type) for one in classes):
            hint = f"{{{given.__name__}}}" if is_one else "a set of classes"
            raise ArgumentTypeError(f"ModuleWrapPolicy: got {given!r}, expected {hint}")
        self._classes = classes

    def choose(self, root: nn.Module, ignored: Collection[nn.Module]) -> dict[nn.Module, Options]:
        """See ``Policy``."""
        found = (module for module in root.modules() if module not in ignored)
        return {module: {} for module in found if isinstance(module, self._classes)}

    def __call__(
        self, module: nn.Module, recurse: bool, nonwrapped_numel: int = -1, **_: Any
    ) -> bool:
        """Answer like a function policy; see the top of this file."""
        return recurse or isinstance(module, self._classes)

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({{{', '.join(map(str, self._classes))}}})"


class CustomPolicy:
    """A policy that asks a function whether a module becomes a unit, and with which options.

    The function returns False or ``{}`` for no, True for yes, or a dict of the options in which
    the unit differs from the model itself.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | Options]) -> None:
        """Keep ``lambda_fn``.

        Raises:
            ArgumentTypeError: if ``lambda_fn`` is not callable.
        """
        if not callable(lambda_fn):
            raise ArgumentTypeError(
                f"CustomPolicy(lambda_fn={lambda_fn!r}): expected a function of a module"
            )
        self._answer = lambda_fn

    def choose(self, root: nn.Module, ignored: Collection[nn.Module]) -> dict[nn.Module, Options]:
        """See ``Policy``.

        Raises:
            ArgumentTypeError: if the function returns neither a bool nor a dict.
        """
        found: dict[nn.Module, Options] = {}
        for name, module in root.named_modules():
            if module in ignored:
                continue
            answer = self._answer(module)
            if not isinstance(answer, (bool, dict)):
                raise ArgumentTypeError(
                    f"CustomPolicy: the function answered {answer!r} for "
                    f"{name or 'the model itself'} ({type(module).__name__}); expected True, "
                    "False or a dict of options"
                )
            if answer:
                found[module] = dict(answer) if isinstance(answer, dict) else {}
        return found

    def __repr__(self) -> str:
        return f"CustomPolicy({self._answer!r})"


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Make every module a unit, containers too."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """Make every module a unit for which ``lambda_fn(module)`` is true."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: Iterable[type[nn.Module]],
) -> bool:
    """Make every instance of the given transformer layer classes a unit."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: Classes | None = None,
    exclude_wrap_modules: Classes | None = None,
) -> bool:
    """Make modules units bottom-up, as soon as enough elements are in no unit yet.

    Args:
        module: see the top of this file, also for the next two arguments.
        recurse: whether the question is about modules inside ``module``.
        nonwrapped_numel: number of elements that are in no unit.
        min_num_params: number of elements that is enough for a unit.
        force_leaf_modules: classes whose instances and all modules inside them never become
            units; None: ``size_based_auto_wrap_policy.FORCE_LEAF_MODULES``.
        exclude_wrap_modules: classes whose instances do not become units themselves;
            None: ``size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES``.
    """
    if nonwrapped_numel < min_num_params:
        return False
    own = cast("Any", size_based_auto_wrap_policy)
    leaves = own.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    excluded = own.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return not isinstance(module, tuple(leaves if recurse else excluded))


# Programs written for PyTorch look up these attributes of the function.
vars(size_based_auto_wrap_policy).update(
    FORCE_LEAF_MODULES={nn.MultiheadAttention},  # its forward reads parameters of its children
    EXCLUDE_WRAP_MODULES={nn.ModuleList, nn.ModuleDict},  # they have no forward
)


_now: ContextVar[Callable[..., nn.Module] | None] = ContextVar("fullshard_wrapping", default=None)
"""The wrapper of the ``enable_wrap`` block that is active."""


@contextmanager
def enable_wrap(*, wrapper_cls: Any, **wrapper_kwargs: Any) -> Iterator[None]:
    """Make ``wrap(module)`` return ``wrapper_cls(module, **wrapper_kwargs)`` inside the block.

    Args:
        wrapper_cls: a wrapper class, or a function such as ``fully_shard``.
        wrapper_kwargs: options for all modules.

    Raises:
        UnsupportedError: if called inside another ``enable_wrap`` block.
        AssertedConfigError: if ``wrapper_cls`` is not callable.
    """
    if _now.get() is not None:
        raise UnsupportedError(
            "enable_wrap: called in the block of another one; give wrap() the options that differ"
        )
    if not callable(wrapper_cls):
        raise AssertedConfigError(
            f"enable_wrap(wrapper_cls={wrapper_cls!r}): expected a class or a function that takes "
            "a module"
        )
    token = _now.set(partial(wrapper_cls, **wrapper_kwargs))
    try:
        yield
    finally:
        _now.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Return ``module``, wrapped if ``wrap`` is called inside an ``enable_wrap`` block.

    Args:
        module: a module that may become a unit.
        wrap_overrides: options that override the options of ``enable_wrap``.
    """
    wrapper = _now.get()
    return module if wrapper is None else wrapper(module, **wrap_overrides)
