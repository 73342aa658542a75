"""Make the contents of a rank file: units, policies, sums over all steps, steps in full."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fullshard.engine import Engine, Unit
from fullshard.tensors import local_part
from fullshard.trace.reading import read
from fullshard.trace.steps import History, KeptSegment


def unit_as_json(unit: Unit, engine: Engine, number: int) -> dict[str, Any]:
    """Return the facts of ``unit`` before any step; ``number`` is the number of its engine."""
    worlds = [bucket.spec.layout.world for bucket in unit.buckets]
    return {
        "name": unit.name or "(root)",
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
        "spent": {kind.value: one.as_json() for kind, one in history.spent.items()},
        "totals": [
            {
                "gathers": one.num_gathers,
                "gather": one.gather.as_json(),
                "reduction": one.reduction.as_json(),
            }
            for one in history.units
        ],
        "missed": [[*missed, count] for missed, count in history.missed.items()],
        "steps": [step_as_json(kept, origin_s) for kept in history.kept],
    }


def step_as_json(kept: KeptSegment, origin_s: float) -> dict[str, Any]:
    """Return a step; times are seconds since its start, rounded to tenths of a microsecond.

    Rows are the fields of ``Act``, ``Work``, ``Change`` and ``Missed``.
    """
    segment, step = kept.segment, read(kept)
    start_s = segment.start_s

    def since(at_s: float | None) -> float | None:
        return None if at_s is None else round(at_s - start_s, 7)

    def seconds(one: float | None) -> float | None:
        return None if one is None else round(one, 7)

    return {
        "number": kept.number,
        "start_s": round(start_s - origin_s, 7),
        "duration_s": round(segment.end_s - start_s, 7),
        "allocated_nbytes": segment.allocated_nbytes,
        "held": step.held,
        "actions": [
            [op, unit, since(at_s), seconds(host_s), since(lane_start_s), seconds(lane_s)]
            for op, unit, at_s, host_s, lane_start_s, lane_s in step.acts
        ],
        "work": [
            [what, unit, since(at_s), seconds(took_s)] for what, unit, at_s, took_s in step.works
        ],
        "buffers": [[since(one.at_s), *one[1:]] for one in step.changes],
        "missed": [list(one) for one in kept.missed],
    }
