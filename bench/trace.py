"""The cost of a trace: step time on two gloo ranks with it, as a share of that without it.

Both take their steps in turn on the same model in the same processes, so that whatever the machine
does to one it does to the other; a figure is a ratio of medians. Starting and stopping, which
happen once, are not in it.
"""

from __future__ import annotations

import statistics
import tempfile
from functools import partial

import torch.distributed as dist

import fullshard
from bench.compare import in_turns, medians, on_ranks, verdict
from bench.contenders import CONTENDERS, RAGGED
from bench.machine import table
from bench.models import SHAPES, Shape
from bench.step import WORLD, steps_of

WARM_UP, ROUNDS, STEPS = 2, 20, 5
BOUND = 1.02
"""Largest share of the step without a trace that is aimed at."""


def measure(shape: Shape, folder: str) -> float:
    """The share on this rank: the mean of a round's steps, with a trace and without."""
    (step,) = steps_of({RAGGED: CONTENDERS[RAGGED]}, shape).values()
    trace = fullshard.trace(step.args[0], folder)

    def mean_of_steps(*, traced: bool) -> float:
        if traced:
            trace.start()
        dist.barrier()
        taken = [step().step for _ in range(STEPS)]
        if traced:
            trace.stop()
        return statistics.fmean(taken)

    calls = {str(traced): partial(mean_of_steps, traced=traced) for traced in (False, True)}
    seconds = medians(in_turns(calls, warm_up=WARM_UP, rounds=ROUNDS, samples=4))
    return seconds["True"] / seconds["False"]


def work(folder: str) -> dict[str, float]:
    """Return the shares of this rank, by model."""
    return {name: measure(shape, folder) for name, shape in SHAPES.items()}


def figures() -> dict[str, float]:
    """By model: step time with a trace as a share of that without.

    Raises:
        Loaded: the machine was not idle.
    """
    with tempfile.TemporaryDirectory() as folder:
        return on_ranks(work, WORLD, folder)[0]


def report(found: dict[str, float]) -> int:
    """Print the table; how many bounds were missed."""
    print(f"step time with a trace as a share of that without, {WORLD} ranks\n")
    print(table(["model", "share"], [[name, f"{share:.3f}"] for name, share in found.items()]))
    missed = [name for name, share in found.items() if share > BOUND]
    return verdict(missed, f"bound: {BOUND}, missed")
