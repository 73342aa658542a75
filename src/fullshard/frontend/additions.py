"""Parameters that users add below sharded modules: nothing shards them or reduces their gradients.

PyTorch's FSDP says nothing of them, and ranks then train different values.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from itertools import chain

from torch import nn
from torch.distributed.tensor import DTensor

from fullshard._torch import nn as _nn
from fullshard.engine import Unit
from fullshard.frontend.flat_param import FLAT_PARAM
from fullshard.frontend.hooks import num_registrations
from fullshard.frontend.ownership import owner_of, unit_of
from fullshard.frontend.places import Place


class Additions:
    """The modules of a unit as they were, to notice what was added since."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Take the modules that the unit manages, see ``ownership.managed``.

        Units have taken their parameters. The other parameters were left out on purpose, and may
        be replaced.
        """
        self._modules = list(modules)
        self._known = [
            {FLAT_PARAM, *module._parameters, *_left_out(module)} for module in self._modules
        ]
        self._children = [module._modules for module in self._modules]
        self._params = [module._parameters for module in self._modules]
        self._seen = self._now()
        self._looked_at = num_registrations()

    def _now(self) -> list[object]:
        """Return what is directly below the modules, and how many parameters they have."""
        children = chain.from_iterable(map(dict.values, self._children))
        return [*children, sum(map(len, self._params))]

    def warn(self, unit: Unit) -> None:
        """Warn, once each, of trainable parameters that were added below ``unit``."""
        looked_at, self._looked_at = self._looked_at, num_registrations()
        if looked_at == self._looked_at:
            return
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
            for path, described in _plain_in(module).items():
                if path not in known:
                    yield described
                    known.add(path)


def _is_managed(module: nn.Module) -> bool:
    is_sharded = _nn.is_managed(module) or unit_of(module) is not None
    return is_sharded or _nn.is_replicated(module)


def _left_out(module: nn.Module) -> list[str]:
    """Return the paths of parameters below ``module`` that no unit owns."""
    return [
        f"{path}.{name}"
        for child_name, child in module._modules.items()
        if child is not None
        for path, inner in child.named_modules(prefix=child_name)
        for name in inner._parameters
        if owner_of(Place(inner, name)) is None
    ]


def _plain_in(module: nn.Module) -> dict[str, str]:
    """Return paths and descriptions of trainable parameters that no unit owns.

    The walk covers ``module`` and the modules below it that no unit manages.
    """
    found = _described("", module)
    for name, child in module._modules.items():
        if child is not None and not _is_managed(child):
            for path, inner in child.named_modules(prefix=name):
                if not _is_managed(inner):
                    found |= _described(f"{path}.", inner)
    return found


def _described(prefix: str, module: nn.Module) -> dict[str, str]:
    return {
        prefix + name: f"{name} of {type(module).__name__}"
        for name, param in sorted(module._parameters.items())
        if param is not None
        and param.requires_grad
        and not isinstance(param, DTensor)
        and owner_of(Place(module, name)) is None
    }
