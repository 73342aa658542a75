"""The place of a flat parameter in the wrapped module: ``use_orig_params=False``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fullshard.engine import Bucket, FlatParameter, Unit
from fullshard.frontend.places import Place, Places
from fullshard.tensors import AbsentParameter
from fullshard.tensors.form import clean_name

FLAT_PARAM = "_flat_param"
"""Name of the flat parameter in the wrapped module."""


def innermost(module: nn.Module) -> nn.Module:
    """Return ``module`` without the activation checkpoint wrappers around it."""
    while hasattr(module, "_checkpoint_wrapped_module"):
        module = module._checkpoint_wrapped_module  # type: ignore[assignment]
    return module


class FlatPlaces(Places):
    """Places that hold no parameters while these are sharded; one module shows the flat parameter.

    As in PyTorch, attributes of the modules then replace the parameters and have their dtypes.
    """

    def __init__(
        self,
        places: Sequence[Sequence[Sequence[Place]]],
        holder: nn.Module,
        fronts: Sequence[FlatParameter],
    ) -> None:
        super().__init__(places)
        self._holder = holder
        self.fronts = fronts
        self._in_pieces = False
        self._absent: list[AbsentParameter] = []  # one for each slot, once there is a need
        self._absent_of: tuple[torch.dtype, torch.device, bool] | None = None

    def in_their_place(self) -> Sequence[Place]:
        """Return the place of the flat parameter."""
        return [Place(self._holder, FLAT_PARAM) for _ in self.fronts]

    def _show(self, params: Sequence[Sequence[nn.Parameter]]) -> None:
        lent = self._lent
        is_lent = lent is not None and any(one is not None for one in lent)
        hidden = self.shows_sharded and not is_lent and not self._in_pieces
        none: Any = [[None] * len(own) for own in params]
        super()._show(none if hidden else params)
        for front in self.fronts:
            own = self._holder._parameters
            if hidden:
                own[FLAT_PARAM] = front.param
            else:
                own.pop(FLAT_PARAM, None)
        self._stand_in(hidden)

    def _stand_in(self, hidden: bool) -> None:
        """Set attributes in place of parameters, or remove them, as they hide ``_parameters``."""
        if hidden:
            self._refresh_absent()
        for slot, absent in zip(self._slots, self._absent, strict=False):
            attributes = vars(slot.place.module)
            is_ours = isinstance(attributes.get(slot.name), AbsentParameter)
            if hidden and (is_ours or slot.name not in attributes):
                attributes[slot.name] = absent
            elif is_ours:
                del attributes[slot.name]

    def _refresh_absent(self) -> None:
        """Make the stand-ins, unless the existing ones still describe the parameters."""
        for front in self.fronts:  # one at most
            spec = front.spec
            dtype = spec.unsharded_dtype(front.shard.dtype)
            facts = (dtype, spec.device, front.param.requires_grad)
            if facts != self._absent_of:
                self._absent_of = facts
                params = (spec.layout.params[slot.number] for slot in self._slots)
                self._absent = [
                    AbsentParameter.of(clean_name(param.name), param.shape, *facts)
                    for param in params
                ]

    @contextmanager
    def showing_pieces(self, buckets: Sequence[Bucket]) -> Iterator[None]:
        """See ``Places``; otherwise modules show the flat parameter or unsharded parameters."""
        for front in self.fronts:
            front.follow()
        with self.showing_sharded(buckets):
            self._in_pieces = True
            self._show_again(buckets)
            try:
                yield
            finally:
                self._in_pieces = False

    def take_over(self, unit: Unit, *, keeps_ties: bool = False) -> None:
        """See ``engine.Registration``."""
        for front in self.fronts:
            shown = self._holder._parameters.get(FLAT_PARAM)
            if shown is not None and shown is not front.param:
                front.param = shown
                front.introduce()
            front.follow()
        super().take_over(unit, keeps_ties=keeps_ties)

    def _take_over_sharded(self, unit: Unit, *, keeps_ties: bool) -> None:
        """Raise if a module holds a parameter that belongs to the flat parameter."""
        for slot in self._slots if self._lent is None and not self._in_pieces else ():
            now = slot.params.get(slot.name)
            if now is not None:
                raise self._refusal(unit, slot, now)

    def _point(self, targets: dict[int, tuple[int, int]]) -> None:
        super()._point(targets)
        self._absent_of = None
