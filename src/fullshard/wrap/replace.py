"""Replace the modules of a model that became units: ``replace_children``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from fullshard.errors import AssertedConfigError
from fullshard.wrap.units import WantedUnit


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
