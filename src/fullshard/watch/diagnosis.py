"""Diagnoses a job from the status reports of its ranks, by a pure function."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from fullshard.comm.ledger import BETWEEN_STEPS
from fullshard.comm.liveness import NoReport
from fullshard.comm.text import named_ranks
from fullshard.watch.status import GroupStatus, Issued, StatusReport

__all__ = ["NOTHING", "UNDECIDED", "Diagnosis", "Kind", "diagnose"]


class Kind(enum.Enum):
    """The kinds of diagnoses."""

    NOTHING = "nothing"
    """No rank is known to wait in vain."""
    UNDECIDED = "undecided"
    """A rank failed; soon the other ranks fail in the same way, or wait for it."""
    LATE = "late"
    """Some ranks have not reached a collective that other ranks wait in; they may still do so."""
    APART = "apart"
    """Ranks run different collectives, or wait for each other in different ones."""
    FAILED = "failed"
    """An exception ended a step of a rank, or its program."""
    HALF_STEPPED = "half-stepped"
    """A rank failed in a step that other ranks had already ended, or in an optimizer's step."""
    LOST = "lost"
    """The process of a rank has ended."""


class Diagnosis(NamedTuple):
    """The result of a round of the watch."""

    kind: Kind
    ranks: tuple[int, ...]
    """The ranks at fault; for ``APART``, the minority."""
    text: str
    behind: tuple[int, ...] = ()
    """The ranks that have not begun the step which the other ranks drop."""
    silent: tuple[int, ...] = ()
    """The ranks that did not report in this round."""

    @property
    def is_fault(self) -> bool:
        """True if the current step cannot end."""
        return self.kind in (Kind.APART, Kind.FAILED, Kind.HALF_STEPPED, Kind.LOST)


_LOAD = "Load a checkpoint on all ranks"

NOTHING = Diagnosis(Kind.NOTHING, (), "")
UNDECIDED = Diagnosis(Kind.UNDECIDED, (), "")


class _Wait(NamedTuple):
    rank: int
    group: GroupStatus
    issued: Issued | None

    @property
    def number(self) -> int:
        assert self.group.waiting is not None
        return self.group.waiting

    def text(self) -> str:
        what = "a collective" if self.issued is None else self.issued.text()
        return (
            f"rank {self.rank} has waited {self.group.waited_s:.1f} s for {what} (collective "
            f"{self.number} of its group)"
        )


def diagnose(
    reports: Mapping[int, StatusReport], absent: Mapping[int, NoReport], *, patience_s: float
) -> Diagnosis:
    """Return what is wrong, given status reports by rank.

    Args:
        reports: the reports of the ranks that answered, by rank.
        absent: the reasons why the other ranks did not answer, by rank.
        patience_s: seconds; a rank that has waited for less may just be early.
    """
    waits = list(_waits(reports))
    found = (
        _lost(reports, absent, waits)
        or _left_optimizer(reports)
        or _apart(reports)
        or _stepped_elsewhere(reports, patience_s)
        or _failed(reports, absent, waits, patience_s)
        or _late(reports, absent, waits, patience_s)
        or NOTHING
    )
    if not found.is_fault:
        return found
    between = _between_steps(reports) if found.kind is Kind.HALF_STEPPED else _behind(reports)
    return found._replace(behind=tuple(between))


def _waits(reports: Mapping[int, StatusReport]) -> Iterator[_Wait]:
    for rank, report in reports.items():
        for group in report.groups:
            if group.waiting is not None:
                yield _Wait(rank, group, group.numbered(group.waiting))


def _lost(
    reports: Mapping[int, StatusReport], absent: Mapping[int, NoReport], waits: Sequence[_Wait]
) -> Diagnosis | None:
    """Find lost ranks that other ranks need."""
    gone = {rank: no_report.why for rank, no_report in absent.items() if no_report.is_final}
    open_ranks = {rank for rank, report in reports.items() if report.is_open}
    needed = {rank for wait in waits for rank in wait.group.ranks}
    needed |= {r for rank in open_ranks for group in reports[rank].groups for r in group.ranks}
    lost = sorted(rank for rank in gone.keys() & needed if _is_missed(rank, reports, absent, waits))
    if not lost:
        return None
    said = {rank: f"rank {rank} {gone[rank]}" for rank in lost}
    # A rank that ended with the error of another rank's loss is not a cause.
    lost = [r for r in lost if not any(said[other] in gone[r] for other in lost if other != r)]
    text = "; ".join(said[rank] for rank in lost)
    return Diagnosis(Kind.LOST, tuple(lost), _with_waits(text, waits))


def _is_missed(
    rank: int,
    reports: Mapping[int, StatusReport],
    absent: Mapping[int, NoReport],
    waits: Sequence[_Wait],
) -> bool:
    """Return whether other ranks have waited long enough for ``rank``, and for no other rank."""
    least_s = absent[rank].least_wait_s
    return not least_s or any(
        rank in wait.group.ranks
        and wait.group.waited_s > least_s
        and not any(_is_behind(one, wait) for one in reports.values())
        for wait in waits
    )


def _failed(
    reports: Mapping[int, StatusReport],
    absent: Mapping[int, NoReport],
    waits: Sequence[_Wait],
    patience_s: float,
) -> Diagnosis | None:
    """Find ranks whose step was ended by an exception that not all ranks raised at the same place.

    Ranks that have not begun the step skip it. An exiting rank publishes its reason, so no rank
    waits for it. A rank that is too slow to report may be anywhere.
    """
    failed = {rank: report for rank, report in reports.items() if report.failure}
    if not failed:
        return None
    is_early = all(one.failed_s < patience_s for one in failed.values())
    text = _failures(failed)
    if closing := sorted(_closing(reports, waits)):
        if is_early:
            return UNDECIDED
        if any(_has_ended_more(one, reports[rank]) for one in failed.values() for rank in closing):
            text += f", while {named_ranks(closing)} had not ended the step before. {_LOAD}"
            return Diagnosis(Kind.HALF_STEPPED, tuple(failed), text)
    in_vain = [wait for wait in waits if any(_is_behind(one, wait) for one in failed.values())]
    if not in_vain:
        others = [report for rank, report in reports.items() if rank not in failed]
        slow = any(absent[rank].may_train for rank in _members(failed.values()) & absent.keys())
        is_level = _are_level(reports)
        may_begin = is_level and not all(one.ends_program for one in failed.values())
        is_needed = may_begin or slow or any(one.is_open for one in others)
        if is_level and not ((others or slow) and is_needed):
            return None
        if is_needed and is_early:
            return UNDECIDED
    return Diagnosis(Kind.FAILED, tuple(failed), _with_waits(text, in_vain))


def _failures(failed: Mapping[int, StatusReport]) -> str:
    return "; ".join(f"rank {rank} failed: {one.failure}" for rank, one in failed.items())


def _closing(reports: Mapping[int, StatusReport], waits: Sequence[_Wait]) -> Iterator[int]:
    """Find ranks that are about to close a step which other ranks have closed.

    Such a rank has issued all collectives of the step, and all of them can end.
    """
    all_of = reports.values()
    in_vain = {wait.rank for wait in waits if any(_is_behind(one, wait) for one in all_of)}
    for rank, one in reports.items():
        if one.is_open and rank not in in_vain:
            pairs = [pair for other in all_of for pair in _shared_groups(one, other)]
            if any(own.num_closed < its.num_closed <= own.num_issued for own, its in pairs):
                yield rank


def _has_ended_more(one: StatusReport, other: StatusReport) -> bool:
    """Return whether ``one`` has ended more training steps than ``other``."""
    return any(own.num_ended > its.num_ended for own, its in _shared_groups(one, other))


def _shared_groups(
    one: StatusReport, other: StatusReport
) -> Iterator[tuple[GroupStatus, GroupStatus]]:
    """Return both reports of each group that two ranks share."""
    of_other = {(group.name, group.ranks): group for group in other.groups}
    for group in one.groups:
        if other.rank in group.ranks and (group.name, group.ranks) in of_other:
            yield group, of_other[group.name, group.ranks]


def _members(reports: Iterable[StatusReport]) -> set[int]:
    return {rank for one in reports for group in one.groups for rank in group.ranks}


def _left_optimizer(reports: Mapping[int, StatusReport]) -> Diagnosis | None:
    """Find ranks where an exception left the optimizer in the middle of its step.

    If all ranks were left so, they are at fault as well: each may have stepped different weights.
    """
    failed = {rank: report for rank, report in reports.items() if report.is_half_stepped}
    if not failed:
        return None
    text = f"{_failures(failed)}, so the weights there are half-stepped. {_LOAD}"
    return Diagnosis(Kind.HALF_STEPPED, tuple(failed), text)


def _stepped_elsewhere(reports: Mapping[int, StatusReport], patience_s: float) -> Diagnosis | None:
    """Find ranks that failed after the last collective of a step, which other ranks ended.

    A rank that still waits before its optimizer's step, such as for the norm to clip by, can drop
    the step: its weights are not stepped yet.
    """
    failed: dict[int, StatusReport] = {}
    ended: dict[int, StatusReport] = {}
    for rank, report in reports.items():
        those = _ended_step(reports, report) if report.failure else {}
        if those:
            failed[rank] = report
            ended |= those
    if not failed:
        return None
    if not any(one.is_open for one in ended.values()):
        if any(group.blocks_step for one in ended.values() for group in one.groups):
            return None
        if all(one.failed_s < patience_s for one in failed.values()):
            return UNDECIDED
    text = (
        f"{_failures(failed)}, in a step that {named_ranks(sorted(ended))} had already ended: only "
        f"some ranks have its gradients. {_LOAD}"
    )
    return Diagnosis(Kind.HALF_STEPPED, tuple(failed), text)


def _ended_step(
    reports: Mapping[int, StatusReport], failed: StatusReport
) -> dict[int, StatusReport]:
    """Return the reports of the ranks that ended the step in which a rank ``failed``."""
    found = {}
    for group in failed.groups:
        for rank in group.ranks if group.num_issued > group.num_ended else ():
            one = reports.get(rank)
            if one is not None and not one.failure:
                own = [its for its in one.groups if (its.name, its.ranks) == group[:2]]
                if any(its.num_ended >= group.num_issued for its in own):
                    found[rank] = one
    return found


def _apart(reports: Mapping[int, StatusReport]) -> Diagnosis | None:
    """Find the first collective that differs among the ranks of a group."""
    groups: dict[tuple[str, tuple[int, ...]], dict[int, GroupStatus]] = {}
    for rank, report in reports.items():
        for group in report.groups:
            groups.setdefault((group.name, group.ranks), {})[rank] = group
    for (_, ranks), of_rank in groups.items():
        for number in sorted({one.number for group in of_rank.values() for one in group.recent}):
            issued = {rank: group.numbered(number) for rank, group in of_rank.items()}
            alike: dict[Issued, list[int]] = {}
            for rank, one in issued.items():
                if one is not None:
                    alike.setdefault(one, []).append(rank)
            if len(alike) > 1:
                return _differ(number, alike, ranks, reports)
    return None


def _differ(
    number: int,
    alike: Mapping[Issued, list[int]],
    ranks: Sequence[int],
    reports: Mapping[int, StatusReport],
) -> Diagnosis:
    sides = sorted(alike.items(), key=lambda side: -len(side[1]))
    whole = len({one.text() for one in alike}) < len(alike)
    what = ", and ".join(f"{one.text(whole=whole)} on {named_ranks(of)}" for one, of in sides)
    minority = sorted(rank for _, of in sides[1:] for rank in of)
    text = (
        f"ranks run different collectives: collective {number} of {_group(ranks)} is {what}. "
        f"{_advice(alike)}"
    )
    stacks = [
        f"rank {rank} is at {reports[rank].stack}" for rank in minority if reports[rank].stack
    ]
    return Diagnosis(Kind.APART, tuple(minority), "\n".join([text, *stacks[:4]]))


def _advice(issued: Iterable[Issued]) -> str:
    """Return advice for a program whose ranks issue these different collectives."""
    if any(one.kind in BETWEEN_STEPS for one in issued):
        return "Make the same calls in the same order on all ranks, to save and to load, too"
    return "Run the same units of the same model in the same order on all ranks"


def _late(
    reports: Mapping[int, StatusReport],
    absent: Mapping[int, NoReport],
    waits: Sequence[_Wait],
    patience_s: float,
) -> Diagnosis | None:
    """Find the ranks that other ranks wait for and that do not wait themselves.

    A wait for a collective that all ranks have issued does not count: it is about to end.
    """
    behind: dict[int, list[_Wait]] = {}
    for wait in waits:
        if wait.group.waited_s < patience_s:
            continue
        for rank in wait.group.ranks:
            if rank in absent or (rank in reports and _is_behind(reports[rank], wait)):
                behind.setdefault(rank, []).append(wait)
    in_vain = {wait.rank for these in behind.values() for wait in these}
    roots = sorted(behind.keys() - {wait.rank for wait in waits})
    if behind and not roots and behind.keys() <= in_vain:
        text = "ranks wait for each other: " + "; ".join(wait.text() for wait in waits[:8])
        issued = [wait.issued for wait in waits if wait.issued is not None]
        if any(one.kind in BETWEEN_STEPS for one in issued):
            text += f". {_advice(issued)}"
        return Diagnosis(Kind.APART, tuple(sorted(in_vain)), text)
    if not roots:
        return None
    texts = []
    for rank in roots:
        if rank in absent:
            texts.append(f"rank {rank} {absent[rank].why}")
        else:
            stack = reports[rank].stack
            place = f", and is at {stack}" if stack else ""
            last = _last(reports[rank])
            texts.append(f"rank {rank} has not reached this collective{last}{place}")
    needs = [wait for rank in roots for wait in behind[rank]]
    return Diagnosis(Kind.LATE, tuple(roots), _with_waits("; ".join(texts), needs))


def _behind(reports: Mapping[int, StatusReport]) -> Iterator[int]:
    """Find ranks that have not begun the step which other ranks of the same training run.

    A rank that has issued more collectives than a rank in that step has ended it.
    """
    inside = {rank: one for rank, one in reports.items() if one.is_open or one.failure}
    for rank in sorted(_connected(reports, inside) - inside.keys()):
        if not any(_is_ahead(reports[rank], other) for other in inside.values()):
            yield rank


def _between_steps(reports: Mapping[int, StatusReport]) -> Iterator[int]:
    """Find ranks outside of steps, in the training of the failed ranks."""
    for rank in sorted(_connected(reports, [r for r, one in reports.items() if one.failure])):
        if not reports[rank].is_open:
            yield rank


def _connected(reports: Mapping[int, StatusReport], ranks: Iterable[int]) -> set[int]:
    """Return ``ranks`` and all ranks connected to them by shared groups."""
    reached: set[int] = set()
    todo = list(ranks)
    while todo:
        rank = todo.pop()
        if rank not in reached and rank in reports:
            reached.add(rank)
            todo += {member for group in reports[rank].groups for member in group.ranks} - reached
    return reached


def _is_ahead(one: StatusReport, other: StatusReport) -> bool:
    """Return whether ``one`` has issued more collectives than ``other`` on a shared group."""
    issued = {(group.name, group.ranks): group.num_issued for group in other.groups}
    mutual = (group for group in one.groups if other.rank in group.ranks)
    return any(own.num_issued > issued.get((own.name, own.ranks), 0) for own in mutual)


def _is_behind(report: StatusReport, wait: _Wait) -> bool:
    """Return whether the rank belongs to the group but has not issued the awaited collective."""
    key = (wait.group.name, wait.group.ranks)
    found = (group.num_issued for group in report.groups if (group.name, group.ranks) == key)
    return report.rank in wait.group.ranks and next(found, 0) <= wait.number


def _are_level(reports: Mapping[int, StatusReport]) -> bool:
    """Return whether the ranks of each group have issued equally many collectives on it."""
    issued: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    for report in reports.values():
        for group in report.groups:
            issued.setdefault((group.name, group.ranks), set()).add(group.num_issued)
    return all(len(numbers) == 1 for numbers in issued.values())


def _last(report: StatusReport) -> str:
    """Return the words for the newest collectives of the rank, one for each group."""
    newest = [group.newest.text() for group in report.groups if group.newest is not None]
    return f" (its last: {' and '.join(newest[:3])})" if newest else ""


def _with_waits(text: str, waits: Sequence[_Wait]) -> str:
    shown = list(dict.fromkeys(wait.text() for wait in waits))
    more = f"; and {len(shown) - 4} more" if len(shown) > 4 else ""
    return text + (f"; {'; '.join(shown[:4])}{more}" if shown else "")


def _group(ranks: Sequence[int]) -> str:
    return f"the group of {named_ranks(ranks)}"
