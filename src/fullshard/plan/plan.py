"""A plan: the figures of a training step from a dry run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from fullshard.comm.text import in_notebook
from fullshard.device import LaneSpan
from fullshard.frontend import Choice
from fullshard.plan.hardware import Hardware
from fullshard.plan.ledger import Moment
from fullshard.plan.text import in_bytes, in_seconds, table

_LESS = "more ranks, or smaller units"
_LESS_OF = {
    "activations": "checkpoint_blocks(model), a smaller batch, or shorter sequences",
    "backward": "a smaller batch, or shorter sequences",
    **dict.fromkeys(
        ("parameters", "gradients", "optimizer_state"),
        "more ranks that shard, or offload_policy=CPUOffloadPolicy()",
    ),
    "unsharded": "reshard_after_forward=True, smaller units, or a smaller prefetch budget",
    "whole_gradients": "reduce gradients in each microbatch",
}
"""Ways to reduce each kind of memory."""


class PlannedUnit(NamedTuple):
    """The figures of one unit."""

    name: str
    """The name of its module; empty for the root."""
    numel: int
    """Elements of its parameters."""
    shard_nbytes: int
    """Bytes of this rank's shard."""
    unsharded_nbytes: int
    """Bytes of its whole parameters in memory, padding included."""
    padding: float
    """Gathered bytes of padding, as a share of the bytes of parameters."""
    activation_nbytes: int = 0
    """Bytes that one forward saves for backward, without those of inner units."""
    gather_wait_s: float = 0.0
    """Seconds of a step that computation waits for its parameters."""
    reduce_wait_s: float = 0.0
    """Seconds of a step that computation waits for reductions of its gradients."""


class Traffic(NamedTuple):
    """The collectives of one kind in a step."""

    dim: str
    """The mesh dim whose ranks take part; "2 of shard" for neighbours along a dim; "host" for
    copies between host and device."""
    what: str
    num_calls: int
    received_nbytes: int
    """Bytes that this rank receives or copies; in collectives it sends the same number."""


class Tried(NamedTuple):
    """One choice that a search tried."""

    choice: Choice
    peak_nbytes: int
    host_nbytes: int
    step_s: float
    fits: bool


class Measured(NamedTuple):
    """Real steps of one rank whose collectives send nothing."""

    device: str
    """The name of the device."""
    step_s: float
    """Median seconds of a step: the device's work, or the host's where it is slower."""
    peak_nbytes: int | None
    """The most bytes of the device's memory that tensors took in a step; None on a CPU."""
    reserved_nbytes: int | None
    """The most bytes that PyTorch's allocator held for tensors; None on a CPU."""


@dataclass(frozen=True)
class Plan:
    """A step of training as one rank will see it, from a dry run.

    Times are those of the last of a few steps; bytes are the most of any of them.
    """

    hardware: Hardware
    mesh: Mapping[str, int]
    rank: int
    num_parameters: int
    """Number of elements of all parameters of the whole model."""
    units: tuple[PlannedUnit, ...]
    peak: Moment
    """The bytes held at the peak, without ``reserved``."""
    rest: Mapping[str, int]
    """The bytes held between steps, by kind."""
    reserved: Mapping[str, int]
    """The bytes that the framework and communicators hold, in addition to tensors."""
    host: Mapping[str, int]
    """The bytes held in the host's memory at its peak, by kind; between steps, an offloaded unit is
    wholly in the host's memory."""
    traffic: tuple[Traffic, ...]
    step_s: float
    busy_s: float
    """Seconds of a step in which the device computes."""
    flops: float
    """FLOP of matrix products and attention in a step, recomputation included."""
    memory: tuple[Moment, ...] = field(repr=False)
    """The bytes held at each event of a step, by time since it began."""
    spans: tuple[tuple[LaneSpan, str], ...] = field(repr=False)
    """The spans of time on each lane, each with the name of its unit, since the step began."""
    actions: tuple[str, ...] = field(repr=False)
    """The scheduler's actions in a step, as text."""
    choice: Choice | None = None
    """The choice of a search, for ``shard_blocks(model, plan=plan)``; None: without a search."""
    tried: tuple[Tried, ...] = ()
    """The choices that the search tried, the chosen one first."""
    measured: Measured | None = None
    """The same step with real tensors, see ``measure=`` of ``plan``; None: not measured."""

    @property
    def peak_nbytes(self) -> int:
        """The most bytes of the device's memory that the rank holds."""
        return self.peak.nbytes + sum(self.reserved.values())

    @property
    def padded_nbytes(self) -> float:
        """Bytes of padding in all units' unsharded parameters."""
        return sum(unit.padding * unit.unsharded_nbytes for unit in self.units)

    @property
    def host_nbytes(self) -> int:
        """The most bytes that the rank holds in the host's memory."""
        return sum(self.host.values())

    @property
    def excess_nbytes(self) -> int:
        """Bytes beyond the memory of the hardware, device and host together."""
        excess = max(0, self.peak_nbytes - self.hardware.memory_nbytes)
        if self.hardware.host is not None:
            excess += max(0, self.host_nbytes - self.hardware.host.memory_nbytes)
        return excess

    @property
    def fits(self) -> bool:
        """True if the memory of the hardware is enough."""
        return not self.excess_nbytes

    @property
    def wait_s(self) -> float:
        """Seconds of a step that computation waits for communication."""
        return sum(span.end_s - span.start_s for span, _ in self.spans if span.lane == "wait")

    @property
    def utilization(self) -> float:
        """FLOP/s of the step as a share of the hardware's rate of matrix products."""
        rate = max(self.hardware.flops.values(), default=math.inf)
        return self.flops / self.step_s / rate if self.step_s else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the plan without its spans, as values of JSON."""
        return {
            "hardware": self.hardware.name,
            "mesh": dict(self.mesh),
            "rank": self.rank,
            "num_parameters": self.num_parameters,
            "fits": self.fits,
            "peak_nbytes": self.peak_nbytes,
            "peak": _as_json(self.peak) | {"nbytes": self.peak.nbytes},
            "rest": dict(self.rest),
            "host_nbytes": self.host_nbytes,
            "host": dict(self.host),
            "reserved": dict(self.reserved),
            "step_s": self.step_s,
            "busy_s": self.busy_s,
            "wait_s": self.wait_s,
            "flops": self.flops,
            "utilization": self.utilization,
            "units": [
                unit._asdict() | {"exposed_s": unit.gather_wait_s + unit.reduce_wait_s}
                for unit in self.units
            ],
            "traffic": [one._asdict() for one in self.traffic],
            "memory": [_as_json(moment) for moment in self.memory],
            "actions": list(self.actions),
            "choice": None if self.choice is None else str(self.choice),
            "tried": [one._asdict() | {"choice": str(one.choice)} for one in self.tried],
            "measured": None if self.measured is None else self.measured._asdict(),
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        return in_notebook(self)

    def _lines(self) -> Iterator[str]:
        ranks = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        has = in_bytes(self.hardware.memory_nbytes)
        over = in_bytes(self.excess_nbytes)
        verdict = "fits" if self.fits else f"DOES NOT FIT, by {over}"
        of_model = f"{self.num_parameters:,} parameters"
        yield f"rank {self.rank} of {ranks} on {self.hardware.name}, {of_model}"
        yield ""
        yield f"memory   {in_bytes(self.peak_nbytes)} of {has} at the peak: {verdict}"
        yield f"         the peak is at: {self.peak.where}"
        yield from _by_kind({**self.peak.held, **self.reserved})
        if self.host and self.hardware.host is not None:
            has = in_bytes(self.hardware.host.memory_nbytes)
            yield f"host     {in_bytes(self.host_nbytes)} of {has} at its peak"
            yield from _by_kind(self.host)
        yield f"time     {in_seconds(self.step_s)} a step, {in_seconds(self.busy_s)} computing, "
        yield f"         {in_seconds(self.wait_s)} waiting for communication"
        yield f"         {self.flops:.3g} FLOP, {self.utilization:.0%} of what the device reaches"
        if self.measured is not None:
            yield from _against(self, self.measured)
        yield ""
        yield from table(
            ("wires of a step", "collective", "calls", "received"),
            [(one.dim, one.what, str(one.num_calls), in_bytes(one.received_nbytes))
             for one in self.traffic],
        )  # fmt: skip
        yield ""
        alike = groupby(self.units, key=lambda unit: unit[1:5])  # neighbours of equal sizes
        yield from table(_COLUMNS, [_row(list(units)) for _, units in alike])
        if self.tried:
            yield ""
            yield from self._search_lines()
        elif self.peak_nbytes > self.hardware.memory_nbytes:
            yield ""
            most = max(self.peak.held, key=self.peak.held.__getitem__)
            less = _LESS_OF.get(most, _LESS)
            yield f"to fit   most of the peak is {most.replace('_', ' ')}; less of it: {less}"
            yield "         budget_nbytes= (--budget) tries options, and takes the fastest of those"
            yield "         that fit"

    def _search_lines(self) -> Iterator[str]:
        """Say what was chosen, and why not another."""
        chosen, *others = self.tried
        budget = self.hardware.memory_nbytes
        if self.fits:
            yield f"chosen: {chosen.choice}, of {len(self.tried)} that were tried"
            runner_up = next((one for one in others if one.fits), None)
            if runner_up is not None:
                yield (
                    f"next:   {runner_up.choice}: {in_seconds(runner_up.step_s)} a step, "
                    f"{in_bytes(runner_up.peak_nbytes)}"
                )
        else:
            over = in_bytes(self.excess_nbytes)
            yield f"nothing fits: the least is {chosen.choice}, {over} above {in_bytes(budget)}"
            most = max(self.peak.held.items(), key=lambda one: one[1])
            yield f"        most of it is {most[0].replace('_', ' ')}, {in_bytes(most[1])}"
        columns = [("tried", *(str(one.choice) for one in self.tried))]
        columns.append(("peak", *(in_bytes(one.peak_nbytes) for one in self.tried)))
        if any(one.host_nbytes for one in self.tried):
            columns.append(("host", *(in_bytes(one.host_nbytes) for one in self.tried)))
        columns.append(("step", *(in_seconds(one.step_s) for one in self.tried)))
        columns.append(("", *("fits" if one.fits else "too large" for one in self.tried)))
        head, *rows = zip(*columns, strict=True)
        yield from table(head, rows)


def _against(planned: Plan, measured: Measured) -> Iterator[str]:
    """Yield lines that compare measured figures with planned figures."""
    yield (
        f"measured {in_seconds(measured.step_s)} a step on {measured.device}, nothing sent; "
        f"{_ratio(measured.step_s, planned.busy_s)} of the computing above"
    )
    if measured.peak_nbytes is not None and measured.reserved_nbytes is not None:
        yield (
            f"         {in_bytes(measured.peak_nbytes)} of tensors at the peak, "
            f"{_ratio(measured.peak_nbytes, planned.peak.nbytes)} of those above; "
            f"{in_bytes(measured.reserved_nbytes)} reserved"
        )


def _ratio(measured: float, planned: float) -> str:
    return f"{measured / planned:.2f}" if planned else "any number"


def _by_kind(held: Mapping[str, int]) -> Iterator[str]:
    """Yield a line for each kind of bytes, the most first."""
    for kind, nbytes in sorted(held.items(), key=lambda one: -one[1]):
        if nbytes:
            yield f"         {in_bytes(nbytes):>10}  {kind.replace('_', ' ')}"


def _as_json(moment: Moment) -> dict[str, Any]:
    home = {"home": dict(moment.home)} if moment.home else {}
    return {"at_s": moment.at_s, "held": dict(moment.held), "where": moment.where, **home}


_COLUMNS = (
    "units", "elements", "shard", "whole", "padding", "activations", "waits: gather", "reduction"
)  # fmt: skip


def _row(units: Sequence[PlannedUnit]) -> tuple[str, ...]:
    first, last = units[0], units[-1]
    name = first.name or "(root)"
    return (
        name if len(units) == 1 else f"{name} to {last.name} ({len(units)})",
        f"{first.numel:,}",
        in_bytes(first.shard_nbytes),
        in_bytes(first.unsharded_nbytes),
        f"{first.padding:.1%}",
        in_bytes(first.activation_nbytes),
        in_seconds(sum(unit.gather_wait_s for unit in units)),
        in_seconds(sum(unit.reduce_wait_s for unit in units)),
    )
