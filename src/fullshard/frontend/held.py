"""Sharded parameters by the units that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.engine import Bucket, Unit
from fullshard.frontend.places import Place, places_of


class Held(NamedTuple):
    """A sharded parameter, given by unit, bucket and index."""

    unit: Unit
    bucket: Bucket
    number: int  # of the parameter in the bucket

    @property
    def param(self) -> nn.Parameter:
        """The sharded parameter."""
        return self.bucket.sharded_params[self.number]

    def as_dtensor(self, piece: Tensor | None = None) -> Tensor:
        """Return the parameter, or ``piece``, a tensor of its local layout, as a DTensor.

        Without ``piece``, a parameter that is a DTensor is returned itself. Otherwise the DTensor
        is new, and shares the memory of the parameter or of ``piece``.
        """
        if piece is None and isinstance(self.param, DTensor):
            return self.param
        local = self.param.data if piece is None else piece
        return self.bucket.spec.form.as_dtensor(self.number, local)

    @property
    def coordinate(self) -> Sequence[int]:
        """This rank's coordinate among the ranks that hold the sharded parameter."""
        param, spec = self.param, self.bucket.spec
        if isinstance(param, DTensor):
            return param.device_mesh.get_coordinate() or ()
        over_others = spec.parallel[self.number] if spec.parallel else None
        others = over_others.mesh.get_coordinate() if over_others is not None else None
        copy = 0 if spec.replicas is None else spec.replicas.rank
        return (copy, spec.comm.rank, *(others or ()))


def held_params(units: Iterable[Unit]) -> dict[Place, Held]:
    """Return the parameters of ``units`` by place."""
    found: dict[Place, Held] = {}
    for unit in units:
        for slot in places_of(unit).slots():
            found[slot.place] = Held(unit, unit.buckets[slot.bucket], slot.number)
    return found
