"""Wrap the inner modules that an auto-wrap policy chooses as separate units."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from fullshard.errors import ConfigError
from fullshard.flat.options import MixedPrecision
from fullshard.flat.precision import as_mixed_precision
from fullshard.frontend.ownership import unit_of
from fullshard.wrap.units import Ignored, replace_children, units_of
from fullshard.wrap.unity import check_frozen_apart, check_tied_together


def prepare_inside(
    module: nn.Module,
    policy: Any,
    ignored: Ignored,
    given: dict[str, Any],
    make: Callable[..., nn.Module],
) -> None:
    """Replace inner modules that ``policy`` chooses with ``make(inner, **options)``.

    Without a policy only check the unit of ``module``. ``given`` has all the wrapper's arguments.

    Raises:
        ConfigError: see ``_wrap_children``; without a policy only the last reason.
    """
    precision, shown_as_one = given["mixed_precision"], not given["use_orig_params"]
    if policy is not None:
        options = None if precision is None else as_mixed_precision(precision)
        _wrap_children(module, policy, ignored, options, make, shown_as_one=shown_as_one)
    elif shown_as_one:
        inside = [one for one in module.modules() if unit_of(one) is not None]
        check_frozen_apart(module, [], Ignored.of([*ignored.modules, *inside], ignored.params))


def _wrap_children(
    module: nn.Module,
    policy: Any,
    ignored: Ignored,
    precision: MixedPrecision | None,
    make: Callable[..., nn.Module],
    *,
    shown_as_one: bool,
) -> None:
    """Replace inner modules that ``policy`` chooses with ``make(inner, **options)``.

    Modules of the classes that ``precision`` ignores are chosen too, with options that exempt them
    from mixed precision.

    Raises:
        ConfigError: if there are units inside already, or two units would share a parameter; or,
            with ``shown_as_one``, if a unit has both frozen and trainable parameters.
    """
    inside = [name for name, m in module.named_modules() if unit_of(m) is not None]
    if inside:
        raise ConfigError(
            "FullyShardedDataParallel(auto_wrap_policy=...): expected modules that do not already "
            f"have FSDP applied, found it on {', '.join(inside[:5])}"
        )
    single = tuple(precision._module_classes_to_ignore) if precision is not None else ()
    units = units_of(
        module,
        policy,
        ignored,
        single_classes=single,
        single_options={"mixed_precision": None, "_is_exempt": True},
    )
    check_tied_together(module, units, ignored)
    if shown_as_one:
        check_frozen_apart(module, units, ignored)
    alone = {type(unit.module).__name__ for unit in units if isinstance(unit.module, single)}
    if alone:
        warnings.warn(
            "Both mixed precision and an auto_wrap_policy were specified: modules of class "
            f"{', '.join(sorted(alone))} compute in their own dtype. These modules will be wrapped "
            "as separate FSDP units; MixedPrecision(_module_classes_to_ignore=()) leaves them to "
            "the policy",
            stacklevel=5,
        )
    replace_children(module, units, lambda unit: make(unit.module, **unit.options))
