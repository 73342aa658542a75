"""Runs many cases on a pool of ranks, records failures, and continues after them."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from json import loads
from pathlib import Path

from tests.fuzz.case import Case
from tests.fuzz.generate import generate, world_of
from tests.fuzz.run import run_cases
from tests.fuzz.shrink import shrink
from tests.ranks.pool import RankError, RankPool

Run = Callable[..., object]
"""A function that runs cases on ranks: ``run_cases``, perhaps with a defect in place."""


@dataclass(frozen=True)
class Failure:
    seed: int
    kind: str
    """The error without numbers, to group failures."""
    text: str
    """The error of each rank, or the place where the rank hangs."""


@dataclass
class Figures:
    """Counts of cases."""

    passed: Counter[str] = field(default_factory=Counter)
    """Number of passed cases by face and number of ranks."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Number of refusals by kind; a case may have several."""
    failures: list[Failure] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{sum(self.passed.values())} cases passed, {len(self.failures)} failed"]
        lines += [f"  {count:7} {name}" for name, count in sorted(self.passed.items())]
        lines += [f"{sum(self.refusals.values())} refusals"]
        lines += [f"  {count:7} {kind}" for kind, count in self.refusals.most_common()]
        kinds = Counter(failure.kind for failure in self.failures)
        lines += ["failures"] if kinds else []
        for kind, count in kinds.most_common():
            seeds = [failure.seed for failure in self.failures if failure.kind == kind]
            lines.append(f"  {count:7} {kind}  seeds {', '.join(map(str, seeds[:5]))}")
        return "\n".join(lines)


def hunt(
    pool: RankPool,
    seeds: Iterable[int],
    *,
    figures: Figures,
    run: Run = run_cases,
    job: int = 50,
    timeout_s: float = 120.0,
) -> Iterator[Failure]:
    """Run ``seeds`` in jobs of cases with equal numbers of ranks; yield the failures."""
    seeds = iter(seeds)
    while chunk := list(islice(seeds, 4 * job)):
        for world in sorted({world_of(seed) for seed in chunk}):
            left = [seed for seed in chunk if world_of(seed) == world]
            while left:
                done, failure = _job(pool, world, left, run=run, timeout_s=timeout_s)
                for one in done:
                    figures.passed[f"{one['face']} on {world}"] += 1
                    figures.refusals.update(one["refusals"])
                left = left[len(done) :]
                if failure is not None:
                    figures.failures.append(failure)
                    left = left[1:]
                    yield failure


def _job(
    pool: RankPool, world: int, cases: Sequence[int | Case], *, run: Run, timeout_s: float
) -> tuple[list[dict[str, object]], Failure | None]:
    """Run cases in one job; return the log lines of those that passed, and the first failure."""
    with tempfile.NamedTemporaryFile(prefix="fullshard-fuzz-") as log:
        failure = None
        try:
            pool.run(world, run, list(cases), log.name, timeout_s=timeout_s)
        except RankError as error:
            failure = str(error)
        done = [loads(line) for line in Path(log.name).read_text().splitlines()]
    if failure is None:
        return done, None
    if len(done) == len(cases):  # the barrier after the last case failed
        done = done[:-1]
    last = cases[len(done)]
    seed = last if isinstance(last, int) else last.seed
    return done, Failure(seed, _kind_of(failure), failure)


def run_case(pool: RankPool, case: Case, *, timeout_s: float = 60.0) -> Failure | None:
    """Run one case; return None if it passes."""
    return _job(pool, case.world, [case], run=run_cases, timeout_s=timeout_s)[1]


def _kind_of(text: str) -> str:
    """Return the first error of a rank, or the place of a hang."""
    said = re.search(r"^\S*CaseFailed: seed \d+, step -?\d+ (.*)$", text, re.MULTILINE)
    if said:
        return said[1]
    how = re.search(r"---- rank \d+ (still running|died|raised).*----", text)
    where = re.findall(r'File "\S*/(src/fullshard/\S+)", line (\d+)', text)
    place = f" in {where[0][0]}:{where[0][1]}" if where else ""
    return (how[1] if how else "the pool failed") + place


def shrunk(
    pool: RankPool, failure: Failure, *, run: Run = run_cases, timeout_s: float = 20.0
) -> tuple[Case, str]:
    """Return the smallest case found that fails in the same way, and its failure text."""
    said = {"text": failure.text}

    def fails_alike(case: Case) -> bool:
        _, found = _job(pool, case.world, [case], run=run, timeout_s=timeout_s)
        if found is None or _cause(found.kind) != _cause(failure.kind):
            return False
        said["text"] = found.text
        return True

    case = shrink(generate(failure.seed), fails_alike)
    return case, said["text"]


def _cause(kind: str) -> str:
    """Return the kind of an error without the step and the parameter."""
    what = kind.partition(": ")[2] or kind
    return re.sub(r"\b(gradient|parameter|exp\w*|of|output|lent)\b.*", "", what)
