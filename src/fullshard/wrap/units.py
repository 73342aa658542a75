"""``units_of``: what a policy decides about a model, before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fullshard.errors import ArgumentTypeError
from fullshard.wrap.policies import Options, Policy, PolicyFn, PolicyLike


@dataclass(frozen=True, eq=False)
class Wanted:
    """A module that shall become a unit.

    Attributes:
        name: its fully qualified name, that of the first place where it stands.
        module: the module.
        options: those in which it differs from the model itself.
    """

    name: str
    module: nn.Module
    options: Options = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Ignored:
    """What belongs to no unit: modules with all that is in them, and parameters."""

    modules: Collection[nn.Module] = frozenset()
    params: Collection[nn.Parameter] = frozenset()

    @classmethod
    def of(cls, modules: Iterable[nn.Module] = (), params: Iterable[nn.Parameter] = ()) -> Ignored:
        """From what a user names: modules, and parameters that stand elsewhere."""
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
) -> list[Wanted]:
    """The modules below ``root`` that ``policy`` makes units, children before their parents.

    Never ``root`` itself, which becomes one anyway, nor what is ignored. A module that stands in
    several places is asked about once and comes once. Nothing is changed.

    Args:
        root: the model.
        policy: one of ours, one of ``torch.distributed.fsdp.wrap``, or a function policy.
        ignored: what belongs to no unit.
        single_classes: instances of these are units whatever the policy says.
        single_options: options of those, which go before what the policy says.

    Raises:
        ArgumentTypeError: ``policy`` is none.
    """
    single = tuple(single_classes)
    chosen = _chosen(root, policy, ignored, single)
    found = []
    for name, module in bottom_up(root):
        if module is root or module in ignored.modules:
            continue
        is_single = isinstance(module, single)
        if module in chosen or is_single:
            options = {**chosen.get(module, {}), **((is_single and single_options) or {})}
            found.append(Wanted(name, module, options))
    return found


def _chosen(
    root: nn.Module, policy: Any, ignored: Ignored, single: tuple[type[nn.Module], ...]
) -> dict[nn.Module, Options]:
    """What the policy wants, without order; perhaps the root, too."""
    if isinstance(policy, type):
        raise ArgumentTypeError(f"policy is the class {policy.__name__}, expected an instance")
    theirs = getattr(policy, _THEIRS, None)
    if theirs is not None:
        return dict(theirs(root, set(ignored.modules), {}))
    if isinstance(policy, Policy):
        return policy.choose(root, ignored.modules)
    if callable(policy):
        return {module: {} for module in _Walk(policy, ignored, single).over(root)}
    raise ArgumentTypeError(
        f"policy is {policy!r}, expected one of fullshard.wrap, or a function of module, recurse "
        "and nonwrapped_numel"
    )


# What policies of torch.distributed.fsdp.wrap, and those that people derive from them, have for
# ``choose``; it takes the options of the model too.
_THEIRS = "_run_policy"


class _Walk:
    """Asks a function policy about modules, bottom-up, and counts what is in no unit yet."""

    def __init__(
        self, policy: PolicyFn, ignored: Ignored, single: tuple[type[nn.Module], ...]
    ) -> None:
        self._policy, self._ignored, self._single = policy, ignored, single
        self._taken: dict[nn.Module, set[nn.Parameter]] = {}  # by units in each, and by itself
        self._found: list[nn.Module] = []

    def over(self, root: nn.Module) -> list[nn.Module]:
        """The modules that it wants, ``root`` not asked about."""
        self._visit(root, is_asked=True, is_root=True)
        return self._found

    def _visit(self, module: nn.Module, *, is_asked: bool, is_root: bool = False) -> None:
        params = set(module.parameters()).difference(self._ignored.params)
        goes_in = is_asked and self._says(module, params, recurse=True)
        taken = self._taken[module] = set()
        for child in module.children():
            if child in self._ignored.modules:
                continue
            if child not in self._taken:
                self._visit(child, is_asked=goes_in)
            taken |= self._taken[child]
        if is_root:
            return
        is_wanted = goes_in and self._says(module, params - taken, recurse=False)
        if is_wanted or isinstance(module, self._single):
            self._found.append(module)
            self._taken[module] = params

    def _says(self, module: nn.Module, params: Iterable[nn.Parameter], *, recurse: bool) -> bool:
        numel = sum(param.numel() for param in params)
        return bool(self._policy(module=module, recurse=recurse, nonwrapped_numel=numel))


def bottom_up(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules, children before their parents, each once, in its first place."""
    seen: set[nn.Module] = {root}

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for child_name, child in module.named_children():
            if child not in seen:
                seen.add(child)
                yield from visit(f"{name}.{child_name}" if name else child_name, child)
        yield name, module

    yield from visit("", root)


def managed_by(unit: Wanted, others: Collection[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Named parameters in ``unit`` and in none of the ``others``, tied ones in all their places."""
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        if module in seen or (module in others and module is not unit.module):
            return
        seen.add(module)
        prefix = f"{name}." if name else ""
        for param_name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            yield prefix + param_name, param
        for child_name, child in module.named_children():
            yield from visit(prefix + child_name, child)

    yield from visit(unit.name, unit.module)
