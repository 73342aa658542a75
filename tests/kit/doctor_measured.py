"""Example measurements of ``fullshard doctor``."""

from __future__ import annotations

from fullshard.doctor.links import Timing
from fullshard.doctor.report import (
    Dim,
    GroupTimings,
    Report,
)
from fullshard.doctor.speed import Speed
from fullshard.doctor.wires import (
    BETWEEN_HOSTS,
    SHARED_MEMORY,
    Wire,
)
from tests.pure.doctor_facts import (
    a_host,
    a_rank,
)


def timings(world: int, latency_s: float, bandwidth: float) -> list[Timing]:
    """Return timings as ``Hardware.exchange_s`` computes them; an all-reduce takes twice that."""
    found = []
    for nbytes in (1 << 10, 1 << 16, 1 << 22):
        taken_s = latency_s * (world - 1) + nbytes * (world - 1) / world / bandwidth
        found += [Timing(what, nbytes, taken_s) for what in ("all_gather", "reduce_scatter")]
        found.append(Timing("all_reduce", nbytes, 2 * taken_s))
    return found


def a_dim(name: str, *rates: float, carrier: str = SHARED_MEMORY) -> Dim:
    """Return a dim with one group of two ranks per bandwidth."""
    groups = [
        GroupTimings(Wire((2 * i, 2 * i + 1), carrier, True), timings(2, 1e-6, rate))
        for i, rate in enumerate(rates)
    ]
    return Dim(name, 2, groups)


SPEEDS = [Speed({"float32": rate, "bfloat16": 2 * rate}, 1e10, 1e-5) for rate in (4e10, 6e10)]


def measured() -> Report:
    """Return a report on four ranks, on two hosts with two ranks each."""
    ranks = [
        a_rank(number, a_host("one" if number < 2 else "two"), num_threads=4) for number in range(4)
    ]
    report = Report(ranks, 4, "cpu", {"replicate": 2, "shard": 2}, speeds=2 * SPEEDS)
    report.dims = [a_dim("replicate", 1e9, 1e9, carrier=BETWEEN_HOSTS), a_dim("shard", 5e9, 5e9)]
    return report
