"""Parameters that users add below sharded modules: nothing shards them or reduces their gradients.

PyTorch's FSDP says nothing of them, and ranks then train different values.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from torch import nn
from torch.distributed.tensor import DTensor

from fullshard._torch import nn as _nn
from fullshard.comm.text import listed
from fullshard.engine import Unit
from fullshard.frontend.flat_param import FLAT_PARAM
from fullshard.frontend.hooks import registrations
from fullshard.frontend.ownership import owner_of, unit_of
from fullshard.frontend.places import Place
from fullshard.wrap.units import Without


class Additions:
    """The modules of a unit as they were, to notice what was added since."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Take the modules that the unit manages, see ``ownership.managed``.

        Units have taken their parameters. The other parameters were left out on purpose, and may
        be replaced.
        """
        self._modules = list(modules)
        self._known = [
            {FLAT_PARAM, *module._parameters, *_unowned(module, skips=lambda _: False)}
            for module in self._modules
        ]
        self._children = [module._modules for module in self._modules]
        self._params = [module._parameters for module in self._modules]
        self._seen = self._now()
        self._looked_at = registrations()[0]

    def _now(self) -> list[object]:
        """Return what is directly below the modules, and how many parameters they have."""
        children = chain.from_iterable(map(dict.values, self._children))
        return [*children, sum(map(len, self._params))]

    def warn(self, unit: Unit) -> None:
        """Warn, once each, of trainable parameters that were added below ``unit``."""
        looked_at, self._looked_at = self._looked_at, registrations()[0]
        if looked_at == self._looked_at:
            return
        seen, self._seen = self._seen, self._now()
        if seen == self._seen:
            return
        added = list(self._added())
        if added and any(bucket.spec.layout.world > 1 for bucket in unit.buckets):
            warnings.warn(
                f"parameters {listed(added, 8)} were added below unit "
                f"{unit.name or '(root)'} after it was sharded: they are whole on every rank, and "
                "their gradients are not reduced, so ranks train different values. Add modules "
                "before fully_shard, or call fully_shard on the new module before the first step",
                stacklevel=2,
            )

    def _added(self) -> Iterator[str]:
        for module, known in zip(self._modules, self._known, strict=True):
            for path, place in _unowned(module, skips=_is_managed).items():
                param = place.module._parameters[place.name]
                is_trained = param is not None and param.requires_grad
                if path not in known and is_trained and not isinstance(param, DTensor):
                    yield f"{place.name} of {type(place.module).__name__}"
                    known.add(path)


def _is_managed(module: nn.Module) -> bool:
    is_sharded = _nn.is_managed(module) or unit_of(module) is not None
    return is_sharded or _nn.is_replicated(module)


def _unowned(module: nn.Module, skips: Callable[[nn.Module], bool]) -> dict[str, Place]:
    """Return the places in ``module`` of parameters that no unit owns, by path.

    Modules inside for which ``skips`` is true are left out, with all that is only inside of them.
    """
    memo = Without(lambda inner: inner is not module and skips(inner))
    return {
        f"{path}.{name}" if path else name: Place(inner, name)
        for path, inner in module.named_modules(memo)
        for name in sorted(inner._parameters)
        if owner_of(Place(inner, name)) is None
    }
