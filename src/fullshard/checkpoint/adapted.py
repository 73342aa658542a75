"""Models with adapters of ``peft``: names of weights as without them, first values of adapters."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

from fullshard.errors import UnsupportedError
from fullshard.tensors.form import clean_name

_INSIDE = "base_model.model."  # what PeftModel puts before the names of the model
_BASE = "base_layer."
_LOADED_FIRST = (
    "build the model with from_pretrained instead of on the meta device, call get_peft_model, then "
    "shard it"
)


class Adapted(NamedTuple):
    """A layer with adapters, and its path without the prefixes of wrappers."""

    path: str
    layer: Any  # a BaseTunerLayer of peft

    @property
    def prefixes(self) -> tuple[str, ...]:
        """How the names of its adapters' tensors begin."""
        return tuple(f"{self.path}{name}." for name in self.layer.adapter_layer_names)


def adapted_layers(model: nn.Module) -> Iterator[Adapted]:
    """Yield the layers of ``model`` that have adapters."""
    if "peft" not in sys.modules:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    for path, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield Adapted(clean_name(f"{path}." if path else ""), module)


class _Wrapper(NamedTuple):
    """A module of which ``peft`` trains a copy, or copies of some rows.

    Attributes:
        path: prefix of the tensor names in the model without ``peft``.
        used: prefix of the tensors in use: those of the active copy, else of the original.
        originals: prefixes of original tensors that an active copy replaces.
        left_out: prefixes of copies that are not active.
    """

    path: str
    used: str
    originals: tuple[str, ...]
    left_out: tuple[str, ...]


def _wrappers(model: nn.Module) -> Iterator[_Wrapper]:
    if "peft" not in sys.modules:
        return
    from peft.utils import other

    for name, module in model.named_modules():
        path = clean_name(f"{name}." if name else "")
        if isinstance(module, other.ModulesToSaveWrapper):
            copies: dict[str, str] = {
                adapter: f"{path}modules_to_save.{adapter}." for adapter in module.modules_to_save
            }
            active = [] if module.disable_adapters else list(module.active_adapters)
            used = next((copies.pop(one) for one in active if one in copies), "")
            original = f"{path}original_module."
            stands_in = (original,) if used else ()
            yield _Wrapper(path, used or original, stands_in, tuple(copies.values()))
        elif isinstance(module, getattr(other, "TrainableTokensWrapper", ())):
            yield _Wrapper(path, f"{path}token_adapter.", (), ())


def plain_names(model: nn.Module, names: Iterable[str], *, in_use: bool = False) -> dict[str, str]:
    """Return the names that tensors of ``model`` have without adapters, in the given order.

    Names of adapters' own tensors are left out. ``peft`` trains copies of some modules
    (``modules_to_save``). The active copy gets the name of its original; inactive copies are left
    out. With ``in_use``, an original that an active copy replaces is left out, too.
    """
    layers, wrappers = list(adapted_layers(model)), list(_wrappers(model))
    adapters = tuple(prefix for layer in layers for prefix in layer.prefixes)
    adapters += tuple(prefix for one in wrappers for prefix in one.left_out)
    if in_use:
        adapters += tuple(prefix for one in wrappers for prefix in one.originals)
    bases = {f"{layer.path}{_BASE}": layer.path for layer in layers}
    inside = {prefix: one.path for one in wrappers for prefix in (one.used, *one.originals)}
    found = {}
    for name in names:
        if name.startswith(adapters) and adapters:
            continue
        plain = name
        head, between, own = plain.rpartition(_BASE)
        while head + between in bases:  # what has adapters may be the base of another such layer
            plain = bases[head + between] + own
            head, between, own = plain.rpartition(_BASE)
        for prefix, path in inside.items():
            if plain.startswith(prefix):
                plain = path + plain.removeprefix(prefix)
        found[name] = plain.removeprefix(_INSIDE) if layers or wrappers else plain
    return found


def check_merged(model: nn.Module) -> None:
    """Refuse adapters whose changes are not in the weights.

    Raises:
        UnsupportedError: there is one; its path.
    """
    for adapted in adapted_layers(model):
        if not adapted.layer.merged and not adapted.layer.disable_adapters:
            raise UnsupportedError(
                f"{adapted.path.rstrip('.')} has adapters that are not merged, and weights would "
                "go without what they learned: call merge() of each such layer inside of "
                "unshard_params(layer), or save only the adapters with save_pretrained()"
            )


def reset_adapters(model: nn.Module, layer: Any) -> None:
    """Give a layer's adapters the values with which they begin.

    Raises:
        UnsupportedError: these depend on the weights.
    """
    configs: dict[str, Any] = next(
        vars(own)["peft_config"] for own in model.modules() if "peft_config" in vars(own)
    )
    for adapter, config in configs.items():
        how = getattr(config, "init_lora_weights", None)
        if how not in (True, "gaussian"):
            raise UnsupportedError(
                f"adapter {adapter}: init_lora_weights={how!r} with adapters on the meta device; "
                f"use True or 'gaussian', or {_LOADED_FIRST}"
            )
        if getattr(config, "use_dora", False):
            raise UnsupportedError(
                f"adapter {adapter}: use_dora=True with adapters on the meta device; its "
                f"magnitudes begin as norms of the weights: {_LOADED_FIRST}"
            )
        layer.reset_lora_parameters(adapter, how)


def check_loadable(model: nn.Module) -> None:
    """Refuse modules of which ``peft`` has copied rows to train them.

    Raises:
        UnsupportedError: there is one; its path.
    """
    for adapted in adapted_layers(model):
        if hasattr(adapted.layer, "trainable_tokens_delta"):
            raise UnsupportedError(
                f"{adapted.path.rstrip('.')} trains single tokens, copies of rows that loading "
                "would not change: load the weights before get_peft_model"
            )
