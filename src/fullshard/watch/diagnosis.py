"""What is wrong, by what all ranks say of themselves: a function without effects."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from fullshard.comm.ledger import BETWEEN_STEPS
from fullshard.watch.status import Absence, Group, Issued, StatusReport

__all__ = ["NOTHING", "UNDECIDED", "Diagnosis", "Kind", "diagnose"]


class Kind(enum.Enum):
    """What a diagnosis says."""

    NOTHING = "nothing"
    """Nobody waits in vain, as far as can be told."""
    UNDECIDED = "undecided"
    """A rank failed; whether the others fail likewise, or will wait for it, shows soon."""
    LATE = "late"
    """Some ranks have not come to what others wait for; they may still come."""
    APART = "apart"
    """Ranks run different collectives, or wait for each other."""
    FAILED = "failed"
    """A step or the program of a rank was ended by an exception."""
    HALF_STEPPED = "half-stepped"
    """A rank failed in a step that others had ended by then, or in a step of an optimizer."""
    LOST = "lost"
    """The process of a rank has ended."""


class Diagnosis(NamedTuple):
    """What is wrong."""

    kind: Kind
    ranks: tuple[int, ...]
    """The ranks at fault; of ranks that are apart, those in the minority."""
    text: str
    behind: tuple[int, ...] = ()
    """The ranks that have not begun the step which the others drop by a fault."""

    @property
    def is_fault(self) -> bool:
        """True if the step under way cannot end."""
        return self.kind in (Kind.APART, Kind.FAILED, Kind.HALF_STEPPED, Kind.LOST)


NOTHING = Diagnosis(Kind.NOTHING, (), "")
UNDECIDED = Diagnosis(Kind.UNDECIDED, (), "")


class _Wait(NamedTuple):
    rank: int
    group: Group
    issued: Issued | None

    @property
    def number(self) -> int:
        assert self.group.waiting is not None
        return self.group.waiting

    def text(self) -> str:
        what = "a collective" if self.issued is None else self.issued.text()
        return (
            f"rank {self.rank} waits for {what} (collective {self.number} of its group) since "
            f"{self.group.waited_s:.1f} s"
        )


def diagnose(
    reports: Mapping[int, StatusReport], absent: Mapping[int, Absence], *, patience_s: float
) -> Diagnosis:
    """Return what is wrong, by what the ranks ``reports``, and why others are ``absent``.

    Who has waited for less than ``patience_s`` may just be early.
    """
    waits = list(_waits(reports))
    found = (
        _lost(reports, absent, waits)
        or _left_optimizer(reports)
        or _apart(reports)
        or _stepped_elsewhere(reports, patience_s)
        or _failed(reports, waits, patience_s)
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
    reports: Mapping[int, StatusReport], absent: Mapping[int, Absence], waits: Sequence[_Wait]
) -> Diagnosis | None:
    """Find ranks that are gone, if anyone needs them."""
    gone = {rank: absence.why for rank, absence in absent.items() if absence.is_final}
    open_ranks = {rank for rank, report in reports.items() if report.is_open}
    needed = {rank for wait in waits for rank in wait.group.ranks}
    needed |= {r for rank in open_ranks for group in reports[rank].groups for r in group.ranks}
    lost = sorted(rank for rank in gone.keys() & needed if _is_missed(rank, reports, absent, waits))
    if not lost:
        return None
    text = "; ".join(f"rank {rank} {gone[rank]}" for rank in lost)
    return Diagnosis(Kind.LOST, tuple(lost), _with_waits(text, waits))


def _is_missed(
    rank: int,
    reports: Mapping[int, StatusReport],
    absent: Mapping[int, Absence],
    waits: Sequence[_Wait],
) -> bool:
    """Return whether others have waited for ``rank`` for long enough, and for no other rank."""
    least_s = absent[rank].least_wait_s
    return not least_s or any(
        rank in wait.group.ranks
        and wait.group.waited_s > least_s
        and not any(_is_behind(one, wait) for one in reports.values())
        for wait in waits
    )


def _failed(
    reports: Mapping[int, StatusReport], waits: Sequence[_Wait], patience_s: float
) -> Diagnosis | None:
    """Find ranks whose step ended by an exception that not all ranks had at the same place.

    Others may not have begun the step yet; they leave it out then. Whoever ends its program leaves
    word of why, so nobody needs to wait for that.
    """
    failed = {rank: report for rank, report in reports.items() if report.failure}
    if not failed:
        return None
    in_vain = [wait for wait in waits if any(_is_behind(one, wait) for one in failed.values())]
    others = [report for rank, report in reports.items() if rank not in failed]
    if not in_vain:
        is_level = _are_level(reports)
        may_begin = is_level and not all(one.ends_program for one in failed.values())
        is_needed = may_begin or any(one.is_open for one in others)
        if is_level and not (others and is_needed):
            return None
        if is_needed and all(one.failed_s < patience_s for one in failed.values()):
            return UNDECIDED
    text = "; ".join(f"rank {rank} failed: {one.failure}" for rank, one in failed.items())
    return Diagnosis(Kind.FAILED, tuple(failed), _with_waits(text, in_vain))


def _left_optimizer(reports: Mapping[int, StatusReport]) -> Diagnosis | None:
    """Find ranks whose optimizer was left by an exception in the middle of its step.

    Even if all were, nobody knows whether their weights are stepped alike.
    """
    failed = {rank: report for rank, report in reports.items() if report.is_half_stepped}
    if not failed:
        return None
    text = "; ".join(f"rank {rank} failed: {one.failure}" for rank, one in failed.items())
    text += ", so the weights there are half-stepped. Load a checkpoint on all ranks"
    return Diagnosis(Kind.HALF_STEPPED, tuple(failed), text)


def _stepped_elsewhere(reports: Mapping[int, StatusReport], patience_s: float) -> Diagnosis | None:
    """Find ranks whose step ended by an exception after the last collective, so others ended it.

    Who then waits before the next step begins, such as for a norm to clip by, has not stepped its
    weights yet, and drops the step.
    """
    failed: dict[int, StatusReport] = {}
    ended: dict[int, StatusReport] = {}
    for rank, report in reports.items():
        those = _ended_it(reports, report) if report.failure else {}
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
    text = "; ".join(f"rank {rank} failed: {one.failure}" for rank, one in failed.items())
    text += (
        f", in a step that {_some(sorted(ended))} had already ended: only some ranks have "
        "its gradients. Load a checkpoint on all ranks"
    )
    return Diagnosis(Kind.HALF_STEPPED, tuple(failed), text)


def _ended_it(reports: Mapping[int, StatusReport], failed: StatusReport) -> dict[int, StatusReport]:
    """Return the ranks that ended well the step in which a rank ``failed``."""
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
    """Find the first collective that is not the same on all ranks of a group."""
    groups: dict[tuple[str, tuple[int, ...]], dict[int, Group]] = {}
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
    what = ", and ".join(f"{one.text(whole=whole)} on {_some(of)}" for one, of in sides)
    minority = sorted(rank for _, of in sides[1:] for rank in of)
    text = (
        f"ranks do different things: collective {number} of {_group(ranks)} is {what}. "
        f"{_advice(alike)}"
    )
    stacks = [
        f"rank {rank} is at {reports[rank].stack}" for rank in minority if reports[rank].stack
    ]
    return Diagnosis(Kind.APART, tuple(minority), "\n".join([text, *stacks[:4]]))


def _advice(issued: Iterable[Issued]) -> str:
    """Return what is wrong in a program whose ranks issue these where they should be alike."""
    if any(one.kind in BETWEEN_STEPS for one in issued):
        return "All ranks must make the same calls at the same place, to save and to load, too"
    return "They run different units or different models, or in another order"


def _late(
    reports: Mapping[int, StatusReport],
    absent: Mapping[int, Absence],
    waits: Sequence[_Wait],
    patience_s: float,
) -> Diagnosis | None:
    """Find the ranks that others wait for and that wait for nobody themselves.

    A wait for what all ranks have issued is not in vain: it is about to end.
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
            texts.append(f"rank {rank} has not come to it{_after(reports[rank])}{place}")
    needs = [wait for rank in roots for wait in behind[rank]]
    return Diagnosis(Kind.LATE, tuple(roots), _with_waits("; ".join(texts), needs))


def _behind(reports: Mapping[int, StatusReport]) -> Iterator[int]:
    """Find ranks between two steps, of which others, in the same job of training, run the second.

    Who has issued more than those has ended that step; who waits hears of the fault there.
    """
    inside = {rank: one for rank, one in reports.items() if one.is_open or one.failure}
    reached = _connected(reports, inside)
    for rank in sorted(reached - inside.keys()):
        one = reports[rank]
        waits = any(group.blocks for group in one.groups)
        if not (waits or any(_is_ahead(one, other) for other in inside.values())):
            yield rank


def _between_steps(reports: Mapping[int, StatusReport]) -> Iterator[int]:
    """Find ranks that are in no step, and wait for nothing, in the same job as those who failed."""
    for rank in sorted(_connected(reports, [r for r, one in reports.items() if one.failure])):
        one = reports[rank]
        if not (one.is_open or any(group.blocks for group in one.groups)):
            yield rank


def _connected(reports: Mapping[int, StatusReport], ranks: Iterable[int]) -> set[int]:
    """Return ``ranks`` and those that share groups with them, with those, and so on."""
    reached: set[int] = set()
    todo = list(ranks)
    while todo:
        rank = todo.pop()
        if rank not in reached and rank in reports:
            reached.add(rank)
            todo += {member for group in reports[rank].groups for member in group.ranks} - reached
    return reached


def _is_ahead(one: StatusReport, other: StatusReport) -> bool:
    """Return whether ``one`` has issued more than ``other`` on a group that they share."""
    issued = {(group.name, group.ranks): group.num_issued for group in other.groups}
    return any(
        group.num_issued > issued.get((group.name, group.ranks), 0)
        for group in one.groups
        if other.rank in group.ranks
    )


def _is_behind(report: StatusReport, wait: _Wait) -> bool:
    """Return whether the rank has not issued what is waited for, and others need it to."""
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


def _after(report: StatusReport) -> str:
    """Return what the rank did last on each of its groups."""
    newest = [group.newest.text() for group in report.groups if group.newest is not None]
    return f" after {' and '.join(newest[:3])}" if newest else ""


def _with_waits(text: str, waits: Sequence[_Wait]) -> str:
    shown = list(dict.fromkeys(wait.text() for wait in waits))
    more = f"; and {len(shown) - 4} more" if len(shown) > 4 else ""
    return text + (f"; {'; '.join(shown[:4])}{more}" if shown else "")


def _group(ranks: Sequence[int]) -> str:
    return f"the group of {_some(ranks)}"


def _some(ranks: Sequence[int]) -> str:
    """Return words such as "rank 3" or "ranks 0, 1, 2 and 5 more"."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks[:8])) + more
