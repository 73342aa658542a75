"""``replace_children``: other modules in the place of those that became units."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from fullshard.errors import AssertedConfigError
from fullshard.wrap.units import Wanted


def replace_children(
    root: nn.Module, units: Sequence[Wanted], make: Callable[[Wanted], nn.Module]
) -> list[nn.Module]:
    """Put ``make(unit)`` wherever the unit's module stands below ``root``.

    In the order of ``units``, so that ``make`` finds what it made before inside of later ones. If
    it raises, everything stands where it stood; what it did to modules themselves is its own
    affair: let it check everything before the first call.

    Args:
        root: the model, which stays.
        units: as from ``units_of``.
        make: from a unit to the module that stands for it, which may be the same.

    Returns:
        What was made, one for each unit.

    Raises:
        AssertedConfigError: ``make`` returned something that is no module.
    """
    # Found before anything moves. The holder of a place may be inside of another unit, and is
    # the bare module then, which stays the holder.
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
