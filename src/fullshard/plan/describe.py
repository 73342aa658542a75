"""What a rank file says: units, their policies, sums over all steps, steps kept whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from fullshard.engine import Engine, Unit
from fullshard.plan.steps import History, Step
from fullshard.schedule import Op
from fullshard.schedule.triggers import (
    NO_TASK,
    BackwardEnter,
    ForwardEnter,
    ForwardExit,
    TaskDied,
    TaskEnd,
)
from fullshard.tensors import local_part

__all__ = ["history_as_json", "resting", "step_as_json", "unit_as_json", "works"]


def unit_as_json(unit: Unit, engine: Engine, number: int) -> dict[str, Any]:
    """Return what is known of ``unit`` before any step; ``number`` is its engine's."""
    worlds = [bucket.spec.layout.world for bucket in unit.buckets]
    return {
        "name": unit.name or "(root)",
        "engine": number,
        "unsharded_nbytes": unit.nbytes,
        "shard_nbytes": sum(bucket.shards.nbytes for bucket in unit.buckets),
        "reduction_nbytes": unit.reduction_nbytes,
        "shards": max(worlds, default=1),
        "encloses": unit.encloses,
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


def history_as_json(history: History, origin_s: float, num_units: int) -> dict[str, Any]:
    """Return sums and steps, with times in seconds since ``origin_s``."""
    return {
        "spent": {kind.value: one.as_json() for kind, one in history.spent.items()},
        "totals": [_totals(history, unit) for unit in range(num_units)],
        "missed": [[*missed, count] for missed, count in history.missed.items()],
        "steps": [step_as_json(step, origin_s) for step in history.kept],
    }


def _totals(history: History, unit: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "acted": {op.value: history.acted[unit, op] for op in Op if (unit, op) in history.acted}
    }
    for name, op in (("gather", Op.WAIT), ("reduction", Op.FINISH_REDUCE)):
        exposed = history.exposed.get((unit, op))
        found[name] = None if exposed is None else exposed.as_json()
    return found


def step_as_json(step: Step, origin_s: float) -> dict[str, Any]:
    """Return a step; its times are seconds since it began, and rounded to tenths of microseconds.

    ``actions`` are (operation, unit, start, seconds of the host, start and seconds on its lane of a
    device or None); ``work`` is as ``works`` returns it; ``buffers`` are (time, kind, bytes, unit).
    """
    start_s = step.start_s

    def since(at_s: float | None) -> float | None:
        return None if at_s is None else round(at_s - start_s, 7)

    return {
        "number": step.number,
        "start_s": round(start_s - origin_s, 7),
        "duration_s": round(step.duration_s, 7),
        "allocated_nbytes": step.allocated_nbytes,
        "held": step.held,
        "actions": [
            [
                act.op.value,
                act.unit,
                since(act.start_s),
                round(act.host_s, 7),
                since(act.lane_start_s),
                None if act.lane_s is None else round(act.lane_s, 7),
            ]
            for act in step.acts
        ],
        "work": [
            [what, unit, since(at_s), round(took_s, 7)] for what, unit, at_s, took_s in works(step)
        ],
        "buffers": [[since(one.at_s), *one[1:]] for one in step.changes],
        "missed": [list(one) for one in step.missed],
    }


def works(step: Step) -> list[tuple[str, int, float, float]]:
    """Return what the model computed: forward, recompute or backward, unit, start and seconds.

    They are times of the host. The backward of a unit lasts until that of another unit begins.
    """
    found: list[tuple[str, int, float, float]] = []
    forwards: list[tuple[str, int, float]] = []
    backward: tuple[int, float] | None = None
    for at_s, trigger, base in step.heard:
        kind = type(trigger)
        if kind is ForwardEnter:
            what = "forward" if trigger.task == NO_TASK else "recompute"
            forwards.append((what, base + trigger.unit, at_s))
        elif kind is ForwardExit:
            found += _left(forwards, base + trigger.unit, at_s)
        elif kind in (BackwardEnter, TaskEnd, TaskDied):
            if backward is not None:
                found.append(("backward", backward[0], backward[1], at_s - backward[1]))
            backward = (base + trigger.unit, at_s) if kind is BackwardEnter else None
    return sorted(found, key=lambda one: one[2])


def _left(
    forwards: list[tuple[str, int, float]], unit: int, at_s: float
) -> Iterable[tuple[str, int, float, float]]:
    """Close the forward of ``unit``, and those inside of it that an exception ended."""
    if not any(entered == unit for _, entered, _ in forwards):
        return
    while forwards:
        what, entered, start_s = forwards.pop()
        yield what, entered, start_s, at_s - start_s
        if entered == unit:
            return
