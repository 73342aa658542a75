"""Modules inside that a policy makes units of their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from fullshard.errors import ConfigError
from fullshard.flat.options import MixedPrecision
from fullshard.frontend.ownership import unit_of
from fullshard.wrap.replace import replace_children
from fullshard.wrap.units import Ignored, units_of
from fullshard.wrap.unity import check_frozen_apart, check_tied_together

__all__ = ["wrap_children"]


def wrap_children(
    module: nn.Module,
    policy: Any,
    ignored: Ignored,
    precision: MixedPrecision | None,
    make: Callable[..., nn.Module],
    *,
    shown_as_one: bool,
) -> None:
    """Replace the modules inside of ``module`` that ``policy`` chooses by ``make(one, **options)``.

    With ``precision`` those of the classes that it leaves out are chosen as well, and their options
    say that they have none.

    Raises:
        ConfigError: there are units inside already; a parameter is in two units; or units show
            one parameter each, and one has frozen and trainable ones.
    """
    inside = [name for name, m in module.named_modules() if unit_of(m) is not None]
    if inside:
        raise ConfigError(
            "FullyShardedDataParallel(auto_wrap_policy=...): expected modules that do not already "
            f"have FSDP applied, found it on {', '.join(inside[:5])}"
        )
    single = precision._module_classes_to_ignore if precision is not None else ()
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
            f"{', '.join(sorted(alone))} become units of their own with mixed precision disabled; "
            "MixedPrecision(_module_classes_to_ignore=()) leaves them to the policy",
            stacklevel=4,
        )
    replace_children(module, units, lambda unit: make(unit.module, **unit.options))
