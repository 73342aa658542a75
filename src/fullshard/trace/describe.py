"""Make the contents of a rank file: units, policies, sums over all steps, steps in full."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from torch import Tensor

from fullshard.engine import Engine, Unit
from fullshard.tensors import local_part
from fullshard.trace.reading import acts, changes, works
from fullshard.trace.steps import History, KeptSegment


def unit_as_json(unit: Unit, engine: Engine, number: int) -> dict[str, Any]:
    """Return the facts of ``unit`` before any step; ``number`` is the number of its engine."""
    worlds = [bucket.spec.layout.world for bucket in unit.buckets]
    return {
        "name": unit.shown_name,
        "engine": number,
        "unsharded_nbytes": unit.nbytes,
        "shard_nbytes": sum(bucket.shards.nbytes for bucket in unit.buckets),
        "reduction_nbytes": unit.reduction_nbytes,
        "shards": max(worlds, default=1),
        "encloses": unit.num_inside > 0,
        "after_forward": engine.policy_of(unit).after_forward.value,
    }


def resting(unit: Unit) -> dict[str, int]:
    """Return the bytes that sharded parameters and gradients of ``unit`` take on its device."""
    found = {"parameters": 0, "gradients": 0}
    for bucket in unit.buckets:
        for param in bucket.sharded_params:
            for kind, tensor in (("parameters", param), ("gradients", param.grad)):
                local = None if tensor is None else local_part(tensor)
                if isinstance(local, Tensor) and local.device.type == unit.device.type:
                    found[kind] += local.nbytes
    return found


def history_as_json(history: History, origin_s: float) -> dict[str, Any]:
    """Return sums and steps, with times in seconds since ``origin_s``."""
    return {
        "first_s": history.first_s,
        "spent": {kind.value: asdict(one) for kind, one in history.spent.items()},
        "totals": [asdict(one) for one in history.units],
        "missed": [[*missed, count] for missed, count in history.missed.items()],
        "steps": [step_as_json(kept, origin_s) for kept in history.kept],
    }


def step_as_json(kept: KeptSegment, origin_s: float) -> dict[str, Any]:
    """Return a step; times are seconds since its start, rounded to tenths of a microsecond.

    Rows are the fields of ``Act``, ``Work``, ``Change`` (without its storage) and ``Missed``.
    """
    segment, start_of = kept.segment, attrgetter("start_s")
    start_s, entries = segment.start_s, segment.entries
    buffers = list(changes(entries))
    held = Counter(segment.held)  # at the end, and then at the start
    for change in buffers:
        held[change.kind] -= change.nbytes

    def since(at_s: float | None, origin_s: float = start_s) -> float | None:
        return None if at_s is None else round(at_s - origin_s, 7)

    return {
        "number": kept.number,
        "start_s": round(start_s - origin_s, 7),
        "duration_s": round(segment.end_s - start_s, 7),
        "allocated_nbytes": segment.allocated_nbytes,
        "held": dict(held),
        "actions": [
            [op, unit, since(at_s), since(host_s, 0.0), since(lane_at_s), since(lane_s, 0.0)]
            for op, unit, at_s, host_s, lane_at_s, lane_s in sorted(acts(kept), key=start_of)
        ],
        "work": [
            [what, unit, since(at_s), since(took_s, 0.0)]
            for what, unit, at_s, took_s in sorted(works(entries), key=start_of)
        ],
        "buffers": [[since(one.at_s), *one[1:4]] for one in buffers],
        "missed": [list(one) for one in kept.missed],
    }
