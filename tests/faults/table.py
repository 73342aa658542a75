"""The table of faults: every fault on each engine, transport and number of ranks."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.faults.jobs import Result, run
from tests.faults.judge import Kind, Verdict, judge
from tests.faults.rank import ON_CPUS, Engine, Job, Wire
from tests.faults.rows import ON_FLAT, End, Fault, Phase, What, rows

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
BEGIN, END = "<!-- faults -->\n", "<!-- end of faults -->\n"
HEAD = (
    "| one rank of the job | " + " | ".join(one.value for one in Engine) + " |\n"
    "|" + "---|" * (1 + len(Engine)) + "\n"
)
WORLDS = (2, 4)


class Variant(NamedTuple):
    """The transport and number of ranks of one job of a cell."""

    wire: Wire
    world: int


@dataclass(frozen=True)
class Case:
    """One job of a cell: a fault on an engine, over a transport, with this number of ranks."""

    fault: Fault
    engine: Engine
    wire: Wire
    world: int

    @property
    def variant(self) -> Variant:
        return Variant(self.wire, self.world)

    def __str__(self) -> str:
        of = f"{self.wire.name.lower()}, {self.world} ranks"
        return f"{self.fault.title} | {self.engine.value} | {of}"

    @property
    def job(self) -> Job:
        """The job; a fault of the build counts as a fault of the first step."""
        at_step = 1 if self.fault.phase is Phase.BUILD else 3
        return Job(self.fault, self.engine, self.wire, self.world, at_step=at_step)

    def seen(self) -> tuple[Result, Verdict]:
        """Run the case; return its result and verdict."""
        return seen(self.job)


def seen(job: Job, look: Callable[[Path], str] = lambda _: "") -> tuple[Result, Verdict]:
    """Run a job, and a reference job if the expectation needs it; ``look`` is that of ``run``."""
    result = run(job, look)
    reference = left_out(without(job)) if job.expected.end is End.GOES_ON else None
    return result, judge(result, reference)


def without(job: Job) -> Job:
    """Return the same job, in which all ranks leave out the step of the fault."""
    fault = Fault(What.LEFT_OUT, Phase.DATA)
    return dataclasses.replace(job, fault=fault, victim=0, saves=False)


@cache
def left_out(job: Job) -> Result:
    return run(job)


def cases(
    engines: Sequence[Engine] = tuple(Engine),
    wires: Sequence[Wire] = ON_CPUS,
    worlds: Sequence[int] = WORLDS,
) -> Iterator[Case]:
    """Yield all cases of the table; PyTorch's engine has one transport on CPUs."""
    for fault in rows():
        for engine in engines:
            if engine is not Engine.FLAT or fault in ON_FLAT:
                for wire in wires if engine is not Engine.TORCH else wires[-1:]:
                    yield from (Case(fault, engine, wire, world) for world in worlds)


def cell(verdicts: Mapping[Variant, Verdict]) -> str:
    """Return the text of a cell; variants that differ only in time share a text."""
    alike: dict[str, list[Variant]] = {}
    for variant, verdict in verdicts.items():
        alike.setdefault(re.sub(r"[\d.]+ s\b", "TIME s", str(verdict)), []).append(variant)
    return "; ".join(
        text.replace("TIME", _span([verdicts[one].after_s for one in variants]))
        + ("" if len(alike) == 1 else f" ({_described(variants, verdicts)})")
        for text, variants in alike.items()
    ).replace("|", "\\|")


def _described(some: Sequence[Variant], among: Iterable[Variant]) -> str:
    """Return a short name of the variants ``some``, without words that are common to all."""
    wires = {wire: [one.world for one in some if one.wire is wire] for wire in Wire}
    worlds = {wire: [one.world for one in among if one.wire is wire] for wire in Wire}
    chosen = {wire: found for wire, found in wires.items() if found}
    names = {
        wire: wire.name.lower() for wire in chosen if len([*filter(None, worlds.values())]) > 1
    }
    if len(names) == 2 and wires[Wire.SHARED] == wires[Wire.SOCKETS]:
        return _ranks(wires[Wire.SHARED])
    return "; ".join(
        ", ".join(filter(None, [names.get(wire), found != worlds[wire] and _ranks(found)]))
        for wire, found in chosen.items()
    )


def _ranks(worlds: Sequence[int]) -> str:
    return f"{' and '.join(map(str, worlds))} ranks"


def _span(times: Sequence[float | None]) -> str:
    """Return the range of some times; unknown times do not count."""
    known = [one for one in times if one is not None]
    low, high = f"{min(known, default=0):.1f}", f"{max(known, default=0):.1f}"
    return low if low == high else f"{low} to {high}"


def parts() -> tuple[str, dict[str, list[str]], str]:
    """Return the page before the table, the cells by title of their row, and the page after it."""
    before, rest = PAGE.read_text().split(BEGIN)
    inside, after = rest.split(END)
    lines = inside.splitlines()[2:]
    cells = [[one.strip() for one in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return before, {title: found for title, *found in cells}, after


def written(found: dict[tuple[str, Engine], str]) -> str:
    """Return the page with the new cells; cells that were not run stay as they are."""
    before, old, after = parts()
    lines = []
    for fault in rows():
        kept = dict(zip(Engine, old.get(fault.title, [""] * len(Engine)), strict=True))
        new = [found.get((fault.title, engine), kept[engine]) for engine in Engine]
        lines.append("| " + " | ".join([fault.title, *new]) + " |\n")
    return f"{before}{BEGIN}{HEAD}{''.join(lines)}{END}{after}"


def run_table(
    words: Sequence[str],
    chosen: Iterable[Case],
    at_once: int,
    tell: Callable[[Case, Result, Verdict], None],
) -> dict[tuple[str, Engine], dict[Variant, Verdict]]:
    """Run cases, several at once; return the verdicts by cell and variant.

    Args:
        words: run only rows whose title contains one of these words; empty: all rows.
    """
    chosen = [
        case for case in chosen if not words or any(word in case.fault.title for word in words)
    ]
    lock = threading.Lock()

    def verdict_of(case: Case) -> Verdict:
        result, verdict = case.seen()
        with lock:
            tell(case, result, verdict)
        return verdict

    found: dict[tuple[str, Engine], dict[Variant, Verdict]] = {}
    with ThreadPoolExecutor(at_once) as threads:
        for case, verdict in zip(chosen, threads.map(verdict_of, chosen), strict=True):
            found.setdefault((case.fault.title, case.engine), {})[case.variant] = verdict
    return found


def failures(found: dict[tuple[str, Engine], dict[Variant, Verdict]]) -> int:
    """Return the number of fullshard's cases that did not end as expected."""
    return sum(
        verdict.kind is not Kind.NAMED
        for (_, engine), verdicts in found.items()
        for verdict in verdicts.values()
        if engine is not Engine.TORCH
    )
