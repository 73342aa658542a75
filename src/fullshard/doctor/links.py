"""Times of our own collectives along one mesh dim, and the latency and bandwidth they amount to."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from fullshard.comm import Collectives
from fullshard.errors import ConfigError

CPU_SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 25)
GPU_SIZES = (*CPU_SIZES, 1 << 28)
"""Bytes of the parts of all ranks of a group together."""

REPETITIONS = 7
_LONGEST_S = 0.25  # no larger sizes after a collective that took as long
_WHAT = ("all_gather", "reduce_scatter", "all_reduce")


class Timing(NamedTuple):
    """The median time of one collective of one size."""

    what: str
    nbytes: int
    """Bytes of the parts of all ranks together."""
    seconds: float

    def bandwidth(self, world: int) -> float:
        """Return the bytes a second that a rank of ``world`` receives (nccl-tests: "busbw")."""
        return received(self.what, self.nbytes, world) / self.seconds


def received(what: str, nbytes: int, world: int) -> float:
    """Return the bytes that each rank has to receive, at least."""
    passes = 2 if what == "all_reduce" else 1
    return passes * nbytes * (world - 1) / world


def settle(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def time_wire(
    wire: Collectives,
    device: torch.device,
    *,
    sizes: Sequence[int] = (),
    repetitions: int = REPETITIONS,
) -> list[Timing]:
    """Return this rank's medians along one mesh dim, whose groups all do the same at once.

    A collective over each group. It leaves out the largest sizes where they would take long.
    """
    found: list[Timing] = []
    for nbytes in sizes or (CPU_SIZES if device.type == "cpu" else GPU_SIZES):
        here = [_median(wire, device, what, nbytes, repetitions) for what in _WHAT]
        found += here
        longest = torch.tensor([max(one.seconds for one in here)], device=device)
        wire.all_reduce_mean(longest).wait()  # so that all ranks go on, or none
        if longest.item() > _LONGEST_S:
            break
    return found


def _median(
    wire: Collectives, device: torch.device, what: str, nbytes: int, repetitions: int
) -> Timing:
    run, nbytes = _collective(wire, device, what, nbytes)
    start = torch.zeros(1, device=device)
    taken = []
    for _ in range(1 + repetitions):
        wire.all_reduce_mean(start).wait()  # all ranks are here
        settle(device)
        before_s = time.perf_counter()
        run()
        settle(device)
        taken.append(time.perf_counter() - before_s)
    return Timing(what, nbytes, statistics.median(taken[1:]))  # the first one warms up


def _collective(
    wire: Collectives, device: torch.device, what: str, nbytes: int
) -> tuple[Callable[[], object], int]:
    """Return a collective of about ``nbytes``, and its bytes."""
    numel = max(1, nbytes // 4 // wire.world)
    part = torch.ones(numel, device=device)
    whole = torch.ones(numel * wire.world, device=device)
    if what == "all_gather":
        return lambda: wire.all_gather([whole], [part]).wait(), whole.nbytes
    if what == "reduce_scatter":
        return lambda: wire.reduce_scatter_mean(part, whole).wait(), whole.nbytes
    return lambda: wire.all_reduce_mean(whole).wait(), whole.nbytes


def median_timings(of_ranks: Iterable[Sequence[Timing]]) -> list[Timing]:
    """Return the medians over ranks, by collective and size."""
    seconds: dict[tuple[str, int], list[float]] = {}
    for timings in of_ranks:
        for one in timings:
            seconds.setdefault((one.what, one.nbytes), []).append(one.seconds)
    return [Timing(*key, statistics.median(taken)) for key, taken in seconds.items()]


class Fit(NamedTuple):
    """The line that times lie on: ``latency_s + nbytes / bandwidth``."""

    latency_s: float
    bandwidth: float


def fitted(points: Iterable[tuple[float, float]]) -> Fit:
    """Return the line through (bytes, seconds), by least squares of the relative errors.

    Absolute errors would leave the latency to the noise of the largest size. Neither value is
    below zero: where the best line would begin there, the best one through zero is taken.

    Raises:
        ConfigError: fewer than two sizes, from which no line can be told.
    """
    points = [(x, y) for x, y in points]
    if len({x for x, _ in points}) < 2:
        raise ConfigError("latency and bandwidth can only be told from times of two sizes or more")
    rows = [(1 / y, x / y) for x, y in points]  # what multiplies latency, and 1 / bandwidth
    a, b, c = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    d, e = (sum(row[i] for row in rows) for i in (0, 1))
    slope = (a * e - b * d) / (a * c - b * b)
    latency_s = (d - b * slope) / a
    if latency_s < 0:
        return Fit(0.0, c / e)
    largest, took_s = max(points)
    return Fit(latency_s, 1 / slope if slope > 0 else largest / took_s)


def fit_of(timings: Iterable[Timing], world: int) -> Fit:
    """Return latency per step and bandwidth of a link, as ``Hardware.exchange_s`` counts them.

    All-gathers and reduce-scatters count alike, since a ``Link`` does not tell them apart.
    """
    points = [
        (received(one.what, one.nbytes, world), one.seconds)
        for one in timings
        if one.what != "all_reduce"
    ]
    latency_s, bandwidth = fitted(points)
    return Fit(latency_s / (world - 1), bandwidth)
