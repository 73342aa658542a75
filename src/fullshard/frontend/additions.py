"""Parameters that users add below sharded modules: nothing shards them or reduces their gradients.

PyTorch's FSDP says nothing of them, and ranks then train different values.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from fullshard import _torch
from fullshard.engine import Unit
from fullshard.frontend.flat_param import FLAT_PARAM
from fullshard.frontend.ownership import owner_of, unit_of
from fullshard.frontend.places import Place


class _Registrations:
    """Counts registrations of modules and parameters in this process, from the first unit on."""

    number = 0
    is_counting = False

    @classmethod
    def count(cls) -> None:
        """Begin to count, with hooks of ``torch.nn``, which then cost each root forward nothing."""
        if not cls.is_counting:
            cls.is_counting = True
            register_module_module_registration_hook(cls._note)
            register_module_parameter_registration_hook(cls._note)

    @classmethod
    def _note(cls, *_: object) -> None:
        cls.number += 1


class Additions:
    """The modules of a unit as they were, to notice what was added since."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Take the modules that the unit manages, see ``ownership.managed``."""
        self._modules = list(modules)
        self._known = [set(module._parameters) | {FLAT_PARAM} for module in self._modules]
        self._children = [module._modules for module in self._modules]
        self._params = [module._parameters for module in self._modules]
        self._seen = self._now()
        _Registrations.count()
        self._looked_at = _Registrations.number

    def _now(self) -> list[object]:
        """Return what is directly below the modules, and how many parameters they have."""
        children = chain.from_iterable(map(dict.values, self._children))
        return [*children, sum(map(len, self._params))]

    def warn(self, unit: Unit) -> None:
        """Warn, once each, of trainable parameters that were added below ``unit``."""
        if self._looked_at == _Registrations.number:
            return
        self._looked_at = _Registrations.number
        now = self._now()
        if now == self._seen:
            return
        self._seen = now
        added = list(self._added())
        if added and any(bucket.spec.layout.world > 1 for bucket in unit.buckets):
            more = f" and {len(added) - 8} more" if len(added) > 8 else ""
            warnings.warn(
                f"parameters {', '.join(added[:8])}{more} were added below unit "
                f"{unit.name or '(root)'} after it was sharded: they are whole on every rank, and "
                "their gradients are not reduced, so ranks train different values. Add modules "
                "before fully_shard, or call fully_shard on the new module before the first step",
                stacklevel=2,
            )

    def _added(self) -> Iterator[str]:
        for module, known in zip(self._modules, self._known, strict=True):
            yield from _named_plain(module, set(module._parameters) - known)
            known |= set(module._parameters)
            for child in module._modules.values():
                if child is not None and not _is_managed(child):
                    for inner in child.modules():
                        if not _is_managed(inner):
                            yield from _named_plain(inner, set(inner._parameters))


def _is_managed(module: nn.Module) -> bool:
    is_sharded = hasattr(module, "_is_fsdp_managed_module") or unit_of(module) is not None
    return is_sharded or _torch.is_replicated(module)


def _named_plain(module: nn.Module, names: Iterable[str]) -> Sequence[str]:
    """Describe the trainable parameters among ``names`` that no unit owns."""
    return [
        f"{name} of {type(module).__name__}"
        for name in sorted(names)
        if (param := module._parameters[name]) is not None
        and param.requires_grad
        and not isinstance(param, DTensor)
        and owner_of(Place(module, name)) is None
    ]
