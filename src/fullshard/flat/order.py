"""Check that all ranks and all iterations run units in the same order, as a debugging aid.

The check runs if ``TORCH_DISTRIBUTED_DEBUG`` is ``DETAIL``, for modules in training mode, and costs
one small collective for each unit of the first iteration.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from fullshard._torch import dynamo as _dynamo
from fullshard.comm import Label
from fullshard.engine import Engine, Unit
from fullshard.errors import ProtocolError
from fullshard.frontend.hooks import engine_of


@dataclass
class _Order:
    """The keys of the units of one engine, in the order in which their forwards began."""

    first: list[int] = field(default_factory=list)
    now: list[int] = field(default_factory=list)
    iteration: int = 0
    deviated: int = 0  # the first iteration with another order; 0: none


@_dynamo.never_compiled
def follow_order(unit: Unit) -> None:
    """Check the order before a forward of ``unit``; in later iterations only warn.

    Raises:
        ProtocolError: if another rank runs a different unit, in the first iteration.
    """
    if dist.get_debug_level() != dist.DebugLevel.DETAIL:  # not ``is``: each call makes an object
        return
    engine = engine_of(unit)
    if engine.scheduler.residents.units[unit.key].carrier is not None:
        return  # ranks may run it in any order
    order = engine.order = engine.order or _Order()
    if engine.scheduler.idle:
        order.iteration += 1
        order.now = []
    number = len(order.now)
    order.now.append(unit.key)
    if order.iteration == 1:
        order.first.append(unit.key)
        _compare_ranks(engine, unit, number)
    elif order.first[number : number + 1] != [unit.key]:
        order.deviated = order.deviated or order.iteration
        if order.deviated == order.iteration:
            _warn(engine, order, unit, number)


def _compare_ranks(engine: Engine, unit: Unit, number: int) -> None:
    """Compare ``unit`` with the units that other ranks of its process group run; a collective."""
    for bucket in unit.buckets[:1]:
        spec = bucket.spec
        comm = spec.comm if spec.comm.world > 1 else spec.replicas
        if comm is None:
            return
        own = torch.tensor([unit.key], device=unit.device)
        all_keys = own.new_empty(comm.world)
        comm.labelled(Label()).all_gather([all_keys], [own]).wait()  # no label: units may differ
        if bool((all_keys != own).any()):
            names = ", ".join(
                f"rank {rank} {_name(engine.units[key])}"
                for rank, key in enumerate(all_keys.tolist())
            )
            raise ProtocolError(
                f"Forward order differs across ranks: as number {number} of the first iteration "
                f"they run {names}. All ranks must run the same units in the same order"
            )


def _warn(engine: Engine, order: _Order, unit: Unit, number: int) -> None:
    was = order.first[number : number + 1]
    before = _name(engine.units[was[0]]) if was else "nothing"
    warnings.warn(
        f"Forward order differs from that of the first iteration on rank {dist.get_rank()}: number "
        f"{number} was {before}, now it is {_name(unit)}. Collectives may not match between ranks",
        stacklevel=3,
    )


def _name(unit: Unit) -> str:
    return unit.name or "(root)"
