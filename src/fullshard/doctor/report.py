"""The report of a doctor's visit: facts, measurements and findings."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from fullshard.doctor.facts import Facts
from fullshard.doctor.findings import DoctorFinding, Level, findings_of, named, warning
from fullshard.doctor.links import Timing, median_timings
from fullshard.doctor.speed import Speed
from fullshard.doctor.wires import Wire, reason


class GroupTimings(NamedTuple):
    """One process group of a mesh dim."""

    wire: Wire
    timings: Sequence[Timing]
    """The medians over its ranks."""

    def bandwidth(self) -> float:
        """Return the bytes a second that a rank receives in the largest all-gather."""
        largest = max((one for one in self.timings if one.what == "all_gather"), key=_size)
        return largest.bandwidth(len(self.wire.ranks))


def _size(timing: Timing) -> int:
    return timing.nbytes


class Dim(NamedTuple):
    """One mesh dim, whose groups were measured at the same time."""

    name: str
    size: int
    groups: Sequence[GroupTimings]

    @property
    def timings(self) -> list[Timing]:
        """Return the medians over groups; empty for a dim of one rank."""
        return median_timings(group.timings for group in self.groups)

    def bandwidth(self) -> float:
        """Return the median of the bandwidths of its groups."""
        return statistics.median(group.bandwidth() for group in self.groups)

    def carriers(self) -> set[str]:
        """Return what carries the all-gathers of its groups."""
        return {group.wire.gathers for group in self.groups}


@dataclass
class Report:
    """The result so far."""

    ranks: list[Facts]
    world: int = 1
    device: str = "cpu"
    shape: Mapping[str, int] = field(default_factory=dict)
    dims: list[Dim] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Why the visit ended early."""

    @property
    def findings(self) -> list[DoctorFinding]:
        """Return what is wrong, errors first."""
        measured = [
            finding
            for finding in (slow_rank(self.speeds), slow_dim(self.dims), slow_group(self.dims))
            if finding is not None
        ]
        return findings_of(self.ranks) + measured

    @property
    def exitcode(self) -> int:
        """Return 1 if the visit ended early or an error was found, else 0."""
        has_errors = any(finding.level is Level.ERROR for finding in self.findings)
        return int(bool(self.failures) or has_errors)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as values of JSON."""
        return {
            "world": self.world,
            "device": self.device,
            "mesh": dict(self.shape),
            "ranks": [asdict(one) for one in self.ranks],
            "dims": [self._dim(dim) for dim in self.dims],
            "speeds": [speed._asdict() for speed in self.speeds],
            "findings": [finding._asdict() for finding in self.findings],
            "failures": self.failures,
        }

    def _dim(self, dim: Dim) -> dict[str, Any]:
        groups = [
            {**group.wire._asdict(), "why": reason(group.wire, self.ranks)} for group in dim.groups
        ]
        timings = [{**one._asdict(), "bandwidth": one.bandwidth(dim.size)} for one in dim.timings]
        return {"name": dim.name, "size": dim.size, "groups": groups, "timings": timings}


_SLOW_RANK = 0.5  # of the median
_SLOW_GROUP = 0.5
_SLOW_DIM = 0.25


@named
def slow_rank(speeds: Sequence[Speed]) -> DoctorFinding | None:
    """Find a rank that computes much more slowly than the others."""
    rates = [speed.flops["float32"] for speed in speeds]
    if len(rates) < 2:
        return None
    slowest, median = min(range(len(rates)), key=rates.__getitem__), statistics.median(rates)
    if rates[slowest] >= _SLOW_RANK * median:
        return None
    return warning(
        f"rank {slowest} computes products of matrices at {rates[slowest] / median:.0%} of the "
        "median rate",
        "look for other processes, fewer threads, or a hot or throttled device: all ranks wait",
    )


@named
def slow_group(dims: Sequence[Dim]) -> DoctorFinding | None:
    """Find a group that communicates much more slowly than the others of its dim."""
    for dim in dims:
        rates = {group.wire.ranks: group.bandwidth() for group in dim.groups if group.timings}
        if len(rates) > 1:
            slowest, median = min(rates, key=rates.__getitem__), statistics.median(rates.values())
            if rates[slowest] < _SLOW_GROUP * median:
                return warning(
                    f"ranks {', '.join(map(str, slowest))} (dim {dim.name}) exchange at "
                    f"{rates[slowest] / median:.0%} of the median rate of such groups",
                    "look at the cables, interfaces and neighbours of their hosts",
                )
    return None


@named
def slow_dim(dims: Sequence[Dim]) -> DoctorFinding | None:
    """Find a dim that is much slower than another of the same wire, or slower although inner."""
    measured = [dim for dim in dims if any(group.timings for group in dim.groups)]
    for i, dim in enumerate(measured):
        for j, other in enumerate(measured):
            is_comparable = i > j or dim.carriers() == other.carriers()
            if is_comparable and dim.bandwidth() < _SLOW_DIM * other.bandwidth():
                return warning(
                    f"dim {dim.name} has {dim.bandwidth() / other.bandwidth():.0%} of the "
                    f"bandwidth of dim {other.name}",
                    "put ranks that share a host, or a faster wire, next to each other on the "
                    "inner dim (the last one), which carries the parameters",
                )
    return None
