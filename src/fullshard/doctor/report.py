"""The report of ``fullshard doctor``: facts, measurements and findings."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from fullshard.doctor.facts import Facts
from fullshard.doctor.findings import DoctorFinding, Level, findings_of, named, warning
from fullshard.doctor.links import Timing, median_timings
from fullshard.doctor.speed import Speed
from fullshard.doctor.wires import Wire, reason


class GroupTimings(NamedTuple):
    """The measurements of one process group of a mesh dim."""

    wire: Wire
    timings: Sequence[Timing]
    """The medians over the ranks of the group; empty for a group of one rank."""

    def bandwidth(self) -> float:
        """Return the bytes per second that a rank receives in the largest all-gather."""
        largest = max((one for one in self.timings if one.what == "all_gather"), key=_size)
        return largest.bandwidth(len(self.wire.ranks))


def _size(timing: Timing) -> int:
    return timing.nbytes


class Dim(NamedTuple):
    """The measurements of one mesh dim, taken in all its groups at the same time."""

    name: str
    size: int
    groups: Sequence[GroupTimings]

    @property
    def timings(self) -> list[Timing]:
        """Return the medians over the groups of the dim; empty for a dim of one rank."""
        return median_timings(group.timings for group in self.groups)

    def bandwidth(self) -> float:
        """Return the median of the groups' bandwidths."""
        return statistics.median(group.bandwidth() for group in self.groups)

    def carriers(self) -> set[str]:
        """Return the transports of the groups."""
        return {group.wire.gathers for group in self.groups}


@dataclass
class Report:
    """The results of a visit, complete on rank 0 only; fields are filled step by step."""

    ranks: list[Facts]
    """All ranks; this rank only, until rank 0 knows the others."""
    world: int = 1
    device: str = "cpu"
    """The type of the device that was measured."""
    shape: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the mesh by name of dim."""
    dims: list[Dim] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)
    """The speed of each rank, in rank order."""
    failures: list[str] = field(default_factory=list)
    """Messages of errors that ended the visit early; empty if it ended normally."""

    @property
    def findings(self) -> list[DoctorFinding]:
        """Return the findings from facts, errors first, then those from measurements."""
        measured = slow_rank(self.speeds), slow_dim(self.dims), slow_group(self.dims)
        return [*findings_of(self.ranks), *filter(None, measured)]

    @property
    def exitcode(self) -> int:
        """Return 1 if the visit ended early or an error was found, else 0."""
        has_errors = any(finding.level is Level.ERROR for finding in self.findings)
        return int(bool(self.failures) or has_errors)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary that can be written as JSON."""
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


_SLOW_RANK = 0.5  # a rank below this share of the median rate is slow
_SLOW_GROUP = 0.5  # a group below this share of the median bandwidth of its dim is slow
_SLOW_DIM = 0.25  # a dim below this share of another dim's bandwidth is slow


@named
def slow_rank(speeds: Sequence[Speed]) -> Iterator[DoctorFinding]:
    """Find a rank that computes much more slowly than the others."""
    rates = [speed.flops["float32"] for speed in speeds]
    if rates and min(rates) < _SLOW_RANK * (median := statistics.median(rates)):
        yield warning(
            f"rank {rates.index(min(rates))} multiplies matrices at {min(rates) / median:.0%} of "
            "the median rate; all other ranks wait for it",
            "look for other processes, fewer threads, or a hot or throttled device",
        )


@named
def slow_group(dims: Sequence[Dim]) -> Iterator[DoctorFinding]:
    """Find a group that communicates much more slowly than the others of its dim."""
    for dim in dims:
        rates = {group.wire.ranks: group.bandwidth() for group in dim.groups if group.timings}
        slowest = min(rates, key=rates.__getitem__, default=())
        if rates and rates[slowest] < _SLOW_GROUP * (median := statistics.median(rates.values())):
            yield warning(
                f"the group of ranks {', '.join(map(str, slowest))} (dim {dim.name}) has "
                f"{rates[slowest] / median:.0%} of the median bandwidth of its dim",
                "check the cables and interfaces of their hosts, and other jobs there",
            )


@named
def slow_dim(dims: Sequence[Dim]) -> Iterator[DoctorFinding]:
    """Find a dim much slower than another dim with the same transport, or than a dim outside it."""
    measured = [dim for dim in dims if any(group.timings for group in dim.groups)]
    for i, dim in enumerate(measured):
        for j, other in enumerate(measured):
            is_comparable = i > j or dim.carriers() == other.carriers()
            if is_comparable and dim.bandwidth() < _SLOW_DIM * other.bandwidth():
                yield warning(
                    f"dim {dim.name} has {dim.bandwidth() / other.bandwidth():.0%} of the "
                    f"bandwidth of dim {other.name}",
                    "order ranks so that the inner dim (the last one), which carries the "
                    "parameters, connects ranks on the same host or on the fastest network",
                )
