"""Judges the endings of a job's ranks as a user would: is the right rank named, and how fast?"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tests.faults.jobs import Ending, Result
from tests.faults.rank import GLOO_TIMEOUT_S, Engine
from tests.faults.rows import End, Who

_ACCUSES = re.compile(
    r"\brank (\d+)(?:(?!rank|had )[^.;,:\n]){0,40}?\b"
    r"(?:is gone|ended|exited|died|was killed|is stopped|was stopped|raised|failed)"
)
"""Matches text that blames a rank; a rank that only waits, or had ended a step, is not blamed."""


class Kind(enum.Enum):
    NAMED = "named"
    WRONG = "wrong"
    SILENT = "nobody is told"
    HANG = "no end"


@dataclass(frozen=True)
class Verdict:
    """The verdict on a job.

    Attributes:
        after_s: seconds from the fault until the last of the judged ranks knew of it.
        ends: the kinds of the judged ranks' endings.
        lacks: the expectations that the job did not meet.
    """

    kind: Kind
    after_s: float | None = None
    ends: str = ""
    lacks: tuple[str, ...] = ()

    def __str__(self) -> str:
        match self.kind:
            case Kind.NAMED:
                return f"named in {self.after_s:.1f} s"
            case Kind.WRONG:
                after = "" if self.after_s is None else f" after {self.after_s:.1f} s"
                return f"{self.ends or 'goes on'}{after}, without {', '.join(self.lacks)}"
            case _:
                return self.kind.value


def ranks_of(who: Who, victim: int, world: int) -> set[int]:
    others = set(range(world)) - {victim}
    return {Who.VICTIM: {victim}, Who.OTHERS: others, Who.ALL: others | {victim}}[who]


def judge(result: Result, reference: Result | None = None) -> Verdict:
    """Return the verdict on a job.

    Args:
        reference: the same job in which all ranks leave the step out; needed for ``End.GOES_ON``.
    """
    job = result.job
    expected = job.expected
    end = expected.end
    speakers = sorted(ranks_of(expected.speak, job.victim, job.world))
    endings = [result.endings[rank] for rank in speakers]
    if any(ending.kind == "hang" for ending in result.endings):
        return Verdict(Kind.HANG)
    if not any(_said(end, ending) or ending.kind for ending in endings):
        return Verdict(Kind.SILENT)
    lacks = [*_unsaid(result, endings), *_undone(result, endings, reference)]
    if result.complaint:
        lacks.append(result.complaint)
    ends = ", ".join(sorted({ending.kind for ending in endings if ending.kind}))
    after_s = max((one for one in map(_known_s, endings) if one is not None), default=None)
    if any((ending.after_s or 0.0) > GLOO_TIMEOUT_S - 1 for ending in endings):
        lacks.append("an end before the time-out")
    return Verdict(Kind.WRONG if lacks else Kind.NAMED, after_s, ends, tuple(lacks))


def _known_s(ending: Ending) -> float | None:
    """Return the seconds after which a rank knew of the fault, by its log or by its end."""
    return min((one for one in (ending.told_s, ending.after_s) if one is not None), default=None)


def _said(end: End, ending: Ending) -> str:
    """Return all messages that a rank got."""
    parts = [text for _, text in ending.logs]
    if end is End.RAISES and ending.kind:
        parts.insert(0, f"{ending.kind}: {ending.text}")
    if end is End.GOES_ON:
        parts = [f"{kind}: {text}" for kind, text in ending.caught] + parts
    return "\n".join(parts)


def _unsaid(result: Result, endings: Iterable[Ending]) -> Iterable[str]:
    """Yield the facts that are missing in the messages of at least one rank."""
    job = result.job
    expected = job.expected
    named = ranks_of(expected.named, job.victim, job.world)
    said = [_said(expected.end, ending) for ending in endings]
    ranks = "|".join(map(str, named))
    wanted = {
        "rank": rf"\brank(?:s|\(s\))?\W+(?:dict_keys\W+)?(?:\d+(?:, | and | to ))*(?:{ranks})\b",
        "unit": job.unit,
        "cause": expected.cause,
    }
    missing = [
        what
        for what, pattern in wanted.items()
        if not all(re.search(pattern, one, re.DOTALL) for one in said)
    ]
    yield from missing
    accused = {int(one[1]) for text in said for one in _ACCUSES.finditer(text)}
    if accused - named:
        yield f"accusing rank {min(accused - named)}"
    if "rank" not in missing and len({_diagnosis(expected.end, one) for one in endings}) > 1:
        yield "one diagnosis"


def _diagnosis(end: End, ending: Ending) -> str:
    """Return a message that must be equal on all ranks: the last log, else the error.

    Warnings count for ``End.IS_TOLD`` only: on a loaded machine one rank alone may warn that others
    are late. Such a rank may also still shard its model, and log each unit, after the fault.
    """
    level = ("INFO", "WARNING", "ERROR") if end is End.IS_TOLD else ("INFO", "ERROR")
    told = [text for one, text in ending.logs if one in level]
    logs = [text for text in told if not text.startswith("unit ")]
    if logs:
        return logs[-1]
    return ending.caught[0][1] if ending.caught else ending.text


def _undone(result: Result, endings: Iterable[Ending], reference: Result | None) -> Iterable[str]:
    """Yield the expectations on errors, progress and weights that the ranks did not meet."""
    expected = result.job.expected
    if expected.end is End.RAISES:
        ours = result.job.engine is not Engine.TORCH
        if ours and not all(ending.kind in expected.errors for ending in endings):
            yield "its class"
        return
    if any(ending.kind for ending in result.endings):
        yield "going on"
    elif expected.end is End.GOES_ON and _differs(result, reference):
        yield "the weights of a run without the step"


def _differs(result: Result, reference: Result | None) -> bool:
    """Return whether the weights of any rank differ from those of a run without the step."""
    assert reference is not None and len(reference.weights) == result.job.world
    expected = reference.weights[0]
    return len(result.weights) < result.job.world or any(
        not torch.equal(one, expected) for one in result.weights
    )
