"""Host time of the scheduler: microseconds a unit and step, with few and with many units."""

from __future__ import annotations

import statistics
import time

from bench.machine import grid, idle
from fullshard.schedule import Scheduler, UnitState
from fullshard.schedule import triggers as when
from fullshard.schedule.triggers import Follows

BOUND_US = 20.0


def step(machine: Scheduler, units: int, task: int) -> None:
    """One training step of a root and ``units`` blocks, as the hooks would tell it."""
    root = units
    uses = {}
    machine.on(when.ForwardEnter(root))
    uses[root] = machine.current_use
    for unit in range(units):
        machine.on(when.ForwardEnter(unit))
        uses[unit] = machine.current_use
        machine.on(when.ForwardExit(unit, follows=Follows.BACKWARD))
    machine.on(when.ForwardExit(root, follows=Follows.BACKWARD))
    machine.on(when.BackwardEnter(root, uses[root], task, until=machine.last_use))
    for unit in reversed(range(units)):
        machine.on(when.BackwardEnter(unit, uses[unit], task, until=uses[unit]))
        machine.on(when.GradsReady(unit, task))
    machine.on(when.GradsReady(root, task))
    machine.on(when.TaskEnd(task))
    machine.on(when.WeightsChanged())


def microseconds(units: int, budget: int | None) -> float:
    """Median microseconds a unit and step."""
    machine = Scheduler()
    for unit in range(units + 1):
        machine.add(UnitState(unit, nbytes=1000, num_inside=units if unit == units else 0))
    machine.on(when.SetMachinePolicy(when.MachinePolicy(prefetch_budget=budget)))
    taken = []
    for task in range(60):
        start = time.perf_counter()
        step(machine, units, task)
        taken.append((time.perf_counter() - start) / (units + 1) * 1e6)
    return statistics.median(taken[10:])


def figures() -> dict[str, dict[str, float]]:
    """By number of units and by budget, microseconds a unit and step.

    Raises:
        Loaded: the machine was not idle.
    """
    with idle():
        return {
            str(units): {
                "one unit ahead": microseconds(units, None),
                "budget of four units": microseconds(units, 4000),
            }
            for units in (8, 50, 200)
        }


def report(found: dict[str, dict[str, float]]) -> int:
    """Print the table; how many bounds were missed."""
    print("scheduler, microseconds a unit and step\n")
    print(grid("units", found, digits=1))
    worst = max(time for times in found.values() for time in times.values())
    print(f"\nbound: {BOUND_US}, largest: {worst:.1f}")
    return int(worst > BOUND_US)
