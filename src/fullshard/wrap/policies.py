"""Policies: whether a module becomes a unit.

A policy is an object with ``choose``, or a function of one module, which is asked while the model
is walked: ``policy(module=..., recurse=..., nonwrapped_numel=...)``. With ``recurse=True`` it says
whether units may be in there at all; then, after everything in there, with ``recurse=False``
whether the module becomes one itself. ``nonwrapped_numel`` are the elements of its parameters, the
second time without those of units in there. ``functools.partial`` binds what else it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol, cast, runtime_checkable

from torch import nn

from fullshard.errors import ArgumentTypeError

Options = dict[str, Any]  # those of one unit, where they differ from the model's
PolicyFn = Callable[..., bool]
Classes = Collection[type[nn.Module]]


@runtime_checkable
class Policy(Protocol):
    """Looks at a whole model."""

    def choose(self, root: nn.Module, ignored: Collection[nn.Module]) -> dict[nn.Module, Options]:
        """The modules of ``root``, those ``ignored`` left out, that become units."""


PolicyLike = Policy | PolicyFn


class ModuleWrapPolicy:
    """Instances of some classes, and of their subclasses, become units.

    It can be called like a function policy too.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        """
        Raises:
            ArgumentTypeError: ``module_classes`` are not classes.
        """
        self._classes = _checked_classes("ModuleWrapPolicy", module_classes)

    def choose(self, root: nn.Module, ignored: Collection[nn.Module]) -> dict[nn.Module, Options]:
        """See ``Policy``."""
        found = (module for module in root.modules() if module not in ignored)
        return {module: {} for module in found if isinstance(module, self._classes)}

    def __call__(
        self, module: nn.Module, recurse: bool, nonwrapped_numel: int = -1, **_: Any
    ) -> bool:
        """Whether ``module`` is one; see the top of this file."""
        return recurse or isinstance(module, self._classes)

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({{{', '.join(map(str, self._classes))}}})"


class CustomPolicy:
    """A function of a module says whether it becomes a unit, and with which options.

    It answers False or ``{}`` for no, True for yes, and options for a unit that differs in these
    from the model itself.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | Options]) -> None:
        """
        Raises:
            ArgumentTypeError: ``lambda_fn`` cannot be called.
        """
        if not callable(lambda_fn):
            raise ArgumentTypeError(
                f"CustomPolicy(lambda_fn={lambda_fn!r}): expected a function of a module"
            )
        self._answer = lambda_fn

    def choose(self, root: nn.Module, ignored: Collection[nn.Module]) -> dict[nn.Module, Options]:
        """See ``Policy``.

        Raises:
            ArgumentTypeError: an answer is neither a bool nor a dict.
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
    """Every module becomes a unit, containers too."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """Modules for which ``lambda_fn(module)`` is true become units."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: Iterable[type[nn.Module]],
) -> bool:
    """Instances of the classes of a transformer's layers become units."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: Classes | None = None,
    exclude_wrap_modules: Classes | None = None,
) -> bool:
    """Modules become units bottom-up, as soon as enough elements are in no unit yet.

    Args:
        module: see the top of this file, also for the next two.
        recurse: whether the question is about what is in the module.
        nonwrapped_numel: the elements that are in no unit.
        min_num_params: how many are enough.
        force_leaf_modules: nothing inside of these becomes a unit, nor do they;
            None: ``size_based_auto_wrap_policy.FORCE_LEAF_MODULES``.
        exclude_wrap_modules: these do not become units themselves;
            None: ``size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES``.
    """
    if nonwrapped_numel < min_num_params:
        return False
    own = cast("Any", size_based_auto_wrap_policy)
    leaves = own.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    excluded = own.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return not isinstance(module, tuple(leaves if recurse else excluded))


# On the function, where programs written for PyTorch look for them.
vars(size_based_auto_wrap_policy).update(
    FORCE_LEAF_MODULES={nn.MultiheadAttention},  # its forward reads parameters of its children
    EXCLUDE_WRAP_MODULES={nn.ModuleList, nn.ModuleDict},  # they have no forward
)


def _checked_classes(label: str, classes: Any) -> tuple[type[nn.Module], ...]:
    given = tuple(dict.fromkeys(classes)) if isinstance(classes, Iterable) else (classes,)
    is_one = isinstance(classes, type)
    if is_one or not all(isinstance(one, type) for one in given):
        hint = f"{{{classes.__name__}}}" if is_one else "a set of classes"
        raise ArgumentTypeError(f"{label}: got {classes!r}, expected {hint}")
    return given
