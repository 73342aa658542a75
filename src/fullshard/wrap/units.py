"""Apply a policy to a model, check that its choices can be units, and replace the modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fullshard.comm.text import listed
from fullshard.errors import ArgumentTypeError, AssertedConfigError, ConfigError
from fullshard.wrap.policies import Options, Policy, PolicyFn, PolicyLike


@dataclass(frozen=True, eq=False)
class WantedUnit:
    """A module that will become a unit.

    Attributes:
        name: the module's fully qualified name (FQN), in its first place.
        module: the module.
        options: the options in which the unit differs from the model itself.
    """

    name: str
    module: nn.Module
    options: Options = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Ignored:
    """The modules, with everything inside them, and the parameters that belong to no unit."""

    modules: Collection[nn.Module] = frozenset()
    params: Collection[nn.Parameter] = frozenset()

    @classmethod
    def of(cls, modules: Iterable[nn.Module] = (), params: Iterable[nn.Parameter] = ()) -> Ignored:
        """Create from the modules that a user names, and from parameters outside of them."""
        below = {inner for module in modules for inner in module.modules()}
        held = {param for module in below for param in module.parameters(recurse=False)}
        return cls(frozenset(below), frozenset(held.union(params)))


def units_of(
    root: nn.Module,
    policy: PolicyLike,
    ignored: Ignored = Ignored(),
    *,
    single_classes: Iterable[type[nn.Module]] = (),
    single_options: Options | None = None,
) -> list[WantedUnit]:
    """Return the modules below ``root`` that ``policy`` makes units, children before parents.

    The result never has ``root`` itself, which becomes a unit anyway, or ignored modules. A module
    in several places is examined once and returned once. Nothing is changed.

    Args:
        root: the model.
        policy: a policy of ours or of ``torch.distributed.fsdp.wrap``, or a function policy.
        ignored: the modules and parameters that belong to no unit.
        single_classes: classes whose instances are units whatever the policy decides.
        single_options: options of these units, which override options from the policy.

    Raises:
        ArgumentTypeError: if ``policy`` is not a policy.
    """
    single = tuple(single_classes)
    chosen = _chosen(root, policy, ignored, single)
    found = []
    for name, module in _children_first("", root, set()):
        if module is root or module in ignored.modules:
            continue
        is_single = isinstance(module, single)
        if module in chosen or is_single:
            options = {**chosen.get(module, {}), **((is_single and single_options) or {})}
            found.append(WantedUnit(name, module, options))
    return found


def _chosen(
    root: nn.Module, policy: Any, ignored: Ignored, single: tuple[type[nn.Module], ...]
) -> dict[nn.Module, Options]:
    """Return the modules that the policy chooses, in any order, perhaps with the root."""
    if isinstance(policy, type):
        raise ArgumentTypeError(f"policy is the class {policy.__name__}, expected an instance")
    theirs = getattr(policy, _THEIRS, None)
    if theirs is not None:
        return dict(theirs(root, set(ignored.modules), {}))
    if isinstance(policy, Policy):
        return policy.choose(root, ignored.modules)
    if callable(policy):
        return {module: {} for module in _asked(root, policy, ignored, single)}
    raise ArgumentTypeError(
        f"policy is {policy!r}, expected one of fullshard.wrap, or a function of module, recurse "
        "and nonwrapped_numel"
    )


# The counterpart of ``choose`` in policies of torch.distributed.fsdp.wrap and in their subclasses;
# this method takes the options of the model too.
_THEIRS = "_run_policy"


def _asked(
    root: nn.Module, policy: PolicyFn, ignored: Ignored, single: tuple[type[nn.Module], ...]
) -> list[nn.Module]:
    """Return the modules below ``root`` that a function policy makes units, asked bottom-up."""
    taken: dict[nn.Module, set[nn.Parameter]] = {}  # module -> parameters in units
    found: list[nn.Module] = []

    def says(module: nn.Module, params: Iterable[nn.Parameter], *, recurse: bool) -> bool:
        numel = sum(param.numel() for param in params)
        return bool(policy(module=module, recurse=recurse, nonwrapped_numel=numel))

    def visit(module: nn.Module, *, is_asked: bool) -> None:
        params = set(module.parameters()).difference(ignored.params)
        goes_in = is_asked and says(module, params, recurse=True)
        inside = taken[module] = set()
        for child in module.children():
            if child in ignored.modules:
                continue
            if child not in taken:
                visit(child, is_asked=goes_in)
            inside |= taken[child]
        if module is root:
            return
        is_wanted = goes_in and says(module, params - inside, recurse=False)
        if is_wanted or isinstance(module, single):
            found.append(module)
            taken[module] = params

    visit(root, is_asked=True)
    return found


def _children_first(
    name: str, module: nn.Module, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``module`` after the modules inside, each in its first place, if not ``seen`` yet."""
    seen.add(module)
    for child_name, child in module.named_children():
        if child not in seen:
            yield from _children_first(f"{name}.{child_name}" if name else child_name, child, seen)
    yield name, module


class Without(set[nn.Module]):
    """A memo of ``named_modules`` that leaves out modules, and modules inside of those alone."""

    def __init__(self, skips: Callable[[nn.Module], bool]) -> None:
        """Take the function that says which modules to leave out."""
        super().__init__()
        self._skips = skips

    def __contains__(self, module: Any) -> bool:
        return super().__contains__(module) or self._skips(module)


def replace_children(
    root: nn.Module, units: Sequence[WantedUnit], make: Callable[[WantedUnit], nn.Module]
) -> list[nn.Module]:
    """Replace each unit's module with ``make(unit)`` in every place below ``root``.

    Units are replaced in order, so that the module of a later unit already contains what ``make``
    returned for earlier units. If ``make`` raises, the original modules are put back, but changes
    that ``make`` made inside a module remain: check everything before the first call.

    Args:
        root: the model, which is not replaced.
        units: in the order of ``units_of``.
        make: returns the replacement for a unit's module, perhaps the same module.

    Returns:
        The modules that ``make`` returned, one for each unit.

    Raises:
        AssertedConfigError: if ``make`` returns an object that is not a module.
    """
    # Found before anything is replaced. The holder of a place may be inside another unit: it is
    # the bare module then, which still holds the place after that unit has been wrapped.
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {unit.module: [] for unit in units}
    for holder in root.modules():
        for name, child in holder._modules.items():
            if child in places:
                places[child].append((holder, name))
    made: list[nn.Module] = []
    try:
        for unit in units:
            new = make(unit)
            if not isinstance(new, nn.Module):
                raise AssertedConfigError(
                    f"{unit.name} was to be wrapped, but what came back is {new!r}; expected a "
                    "module"
                )
            made.append(new)
            _put(new, places[unit.module])
    except BaseException:
        for unit in units[: len(made)]:
            _put(unit.module, places[unit.module])
        raise
    return made


def _put(module: nn.Module, places: Sequence[tuple[nn.Module, str]]) -> None:
    for holder, name in places:
        if holder._modules[name] is not module:
            setattr(holder, name, module)


def check_tied_together(
    root: nn.Module, units: Sequence[WantedUnit], ignored: Ignored = Ignored()
) -> None:
    """Refuse units that would share a parameter with each other, or with the rest of ``root``.

    Parameters are shared if they are tied, or if their module is in several units.

    Raises:
        ConfigError: if a parameter is shared; names the parameter and its units.
    """
    owner: dict[nn.Parameter, tuple[str, WantedUnit]] = {}
    for unit, name, param in _managed(root, units, ignored):
        first_name, first = owner.setdefault(param, (name, unit))
        if first is not unit:
            what = "is" if first_name == name else f"is tied to {first_name}, which is"
            raise ConfigError(
                f"parameter {name} in unit {unit.name or '(root)'} {what} in unit "
                f"{first.name or '(root)'} too; tied parameters must be in one unit: let the "
                "policy leave both modules to a common parent, or ignore the parameter"
            )


def check_alike(root: nn.Module, units: Sequence[WantedUnit], ignored: Ignored = Ignored()) -> None:
    """Refuse units, ``root`` included, that mix frozen and trainable parameters, or dtypes.

    Call this for ``use_orig_params=False``, where a unit shows a single parameter.

    Raises:
        ConfigError: if there is such a unit; names the unit and its parameters.
    """
    by_unit: dict[WantedUnit, tuple[dict[str, list[str]], dict[str, list[str]]]] = {}
    for unit, name, param in _managed(root, units, ignored):
        by_use, by_dtype = by_unit.setdefault(unit, ({}, {}))
        by_use.setdefault("trainable" if param.requires_grad else "frozen", []).append(name)
        by_dtype.setdefault(f"{param.dtype}".removeprefix("torch."), []).append(name)
    for unit, found in by_unit.items():
        for kinds in found:
            if len(kinds) > 1:
                each = (f"{kind} parameters ({listed(kinds[kind], 5)})" for kind in sorted(kinds))
                raise ConfigError(
                    f"unit {unit.name or '(root)'} ({type(unit.module).__name__}) has "
                    f"{' and '.join(each)}, but with use_orig_params=False a unit is one flat "
                    "parameter; give each kind a unit of its own, or set use_orig_params=True"
                )


def check_read_together(root: nn.Module, units: Sequence[WantedUnit]) -> None:
    """Refuse a unit if its parent module reads the unit's parameters without calling the unit.

    Raises:
        ConfigError: if there is such a unit; names the unit.
    """
    read = {m.out_proj for m in root.modules() if type(m) is nn.MultiheadAttention}
    for unit in units:
        if unit.module in read:
            raise ConfigError(
                f"{unit.name} cannot be a unit: MultiheadAttention reads its weight without "
                "calling it; let the policy leave it out, as size_based_auto_wrap_policy does "
                "with force_leaf_modules={nn.MultiheadAttention}"
            )


def _managed(
    root: nn.Module, units: Sequence[WantedUnit], ignored: Ignored
) -> list[tuple[WantedUnit, str, nn.Parameter]]:
    """Return (unit, FQN, parameter) for all parameters that units would own, the root last.

    Tied parameters occur in every place.
    """
    closed = {unit.module for unit in units}
    return [
        (unit, f"{prefix}.{name}" if prefix else name, param)
        for unit in (*units, WantedUnit("", root))
        for prefix, module in unit.module.named_modules(_without(closed, unit), unit.name)
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False)
        if param not in ignored.params
    ]


def _without(closed: Collection[nn.Module], unit: WantedUnit) -> Without:
    return Without(lambda module: module in closed and module is not unit.module)
