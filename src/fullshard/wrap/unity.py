"""Check, before anything is changed, that the parameters of each unit fit together."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from fullshard.errors import ConfigError
from fullshard.wrap.units import Ignored, WantedUnit, Without

_SHOWN = 5  # maximum number of names in a message


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


def check_frozen_apart(
    root: nn.Module, units: Sequence[WantedUnit], ignored: Ignored = Ignored()
) -> None:
    """Refuse units, including ``root``, that have both frozen and trainable parameters.

    Call this for ``use_orig_params=False``, where a unit shows a single parameter.

    Raises:
        ConfigError: if there is such a unit; names the unit and its parameters.
    """
    by_unit: dict[WantedUnit, tuple[list[str], list[str]]] = {}
    for unit, name, param in _managed(root, units, ignored):
        by_unit.setdefault(unit, ([], []))[param.requires_grad].append(name)
    for unit, (frozen, trainable) in by_unit.items():
        if frozen and trainable:
            raise ConfigError(
                f"unit {unit.name or '(root)'} ({type(unit.module).__name__}) has frozen "
                f"parameters ({_listed(frozen)}) and trainable ones ({_listed(trainable)}), but "
                "with use_orig_params=False it shows them as one; make them units of their own, "
                "or set use_orig_params=True"
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


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
