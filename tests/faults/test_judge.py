"""The judge gives the right verdict on made-up endings."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.faults.jobs import Ending, Result
from tests.faults.judge import Kind, Verdict, judge
from tests.faults.rank import ON_CPUS, Engine, Job, Wire
from tests.faults.rows import Fault, Phase, What
from tests.faults.table import Variant, cell

TEXT = "rank 1 raised RuntimeError: an injected fault, in unit blocks.1"
VICTIM = Ending("RuntimeError", "an injected fault", after_s=0.0)
GOOD = Ending("PeerError", TEXT, (("ERROR", TEXT),), 1.5, 1.2)
WEIGHTS = (torch.arange(3.0),) * 3


def job(what: What, phase: Phase = Phase.FORWARD) -> Job:
    return Job(Fault(what, phase), Engine.UNITS, Wire.SHARED, 3)


def verdict_on(what: What, *endings: Ending, complaint: str = "") -> Verdict:
    return judge(Result(job(what), endings, complaint=complaint))


def but(**changes: object) -> Ending:
    return dataclasses.replace(GOOD, **changes)  # type: ignore[arg-type]


def test_all_that_is_expected_was_said() -> None:
    assert (
        str(verdict_on(What.RAISE, GOOD, VICTIM, but(told_s=2.5, after_s=2.6))) == "named in 2.5 s"
    )


@pytest.mark.parametrize(
    ("other", "lacks"),
    [
        (but(text="", logs=()), ("rank", "unit", "cause")),
        (but(text=TEXT.replace("blocks.1", "blocks.12")), ()),  # its log names the unit
        (but(text=TEXT + "!", logs=()), ("one diagnosis",)),
        (but(text=TEXT + ". rank 2 of the group is gone"), ("accusing rank 2",)),
        (but(text=TEXT + ". rank 2 waits for rank 1, which raised"), ()),
        (but(text=TEXT + ", in a step that rank 2 had already ended"), ()),
        (but(logs=(("ERROR", TEXT + "."),)), ("one diagnosis",)),
        (but(logs=(("INFO", TEXT), ("INFO", "unit FSDPBlock: 4 parameters"))), ()),
        (but(kind="RuntimeError"), ("its class",)),
        (but(after_s=29.5), ("an end before the time-out",)),
    ],
)
def test_what_is_missing_on_one_rank_is_told(other: Ending, lacks: tuple[str, ...]) -> None:
    found = verdict_on(What.RAISE, GOOD, VICTIM, other)
    assert found.lacks == lacks
    assert found.kind is (Kind.WRONG if lacks else Kind.NAMED)


def test_a_wrong_unit_or_rank_is_none() -> None:
    wrong = TEXT.replace("blocks.1", "blocks.12").replace("rank 1", "rank 11")
    other = but(text=wrong, logs=(("ERROR", wrong),))
    found = verdict_on(What.RAISE, other, VICTIM, other)
    assert found.lacks == ("rank", "unit", "accusing rank 11")


def test_a_step_may_be_torn_only_where_hosts_do_not_wait() -> None:
    torn = but(kind="TornStepError")
    for wire, lacks in ((Wire.SHARED, ("its class",)), (Wire.DEVICE, ())):
        raised = dataclasses.replace(job(What.RAISE), wire=wire)
        assert judge(Result(raised, (torn, VICTIM, torn))).lacks == lacks


def test_a_complaint_about_what_was_left_is_a_failure() -> None:
    assert verdict_on(What.RAISE, GOOD, VICTIM, GOOD, complaint="x").lacks == ("x",)


def test_one_that_hangs_is_no_end_whatever_others_say() -> None:
    for rank in range(3):
        endings = [GOOD, VICTIM, GOOD]
        endings[rank] = Ending("hang", TEXT)
        assert verdict_on(What.RAISE, *endings).kind is Kind.HANG


def test_an_error_that_nobody_raised_is_silent() -> None:
    assert verdict_on(What.RAISE, Ending("", ""), VICTIM, Ending("", "")).kind is Kind.SILENT
    assert (
        verdict_on(What.STALL, Ending("", ""), Ending("", ""), Ending("", "")).kind is Kind.SILENT
    )


def test_who_is_only_told_must_go_on() -> None:
    text = "rank 1 has not come to the gather of blocks.2 for 2 s, it is in user code"
    told = Ending("", "", (("WARNING", text),), 20.0, 2.1)
    assert str(verdict_on(What.STALL, told, Ending("", ""), told)) == "named in 2.1 s"
    raised = dataclasses.replace(told, kind="PeerError", text=text)
    assert verdict_on(What.STALL, told, Ending("", ""), raised).lacks == ("going on",)


def test_who_caught_must_have_the_weights_of_a_run_without_the_step() -> None:
    caught = Ending("", "", (), 3.0, 0.5, (("PeerError", TEXT),))
    endings = (caught, caught, caught)
    reference = Result(job(What.LEFT_OUT, Phase.DATA), endings, WEIGHTS)

    def found(weights: tuple[torch.Tensor, ...]) -> Verdict:
        return judge(Result(job(What.CAUGHT), endings, weights), reference)

    assert str(found(WEIGHTS)) == "named in 0.5 s"
    wrong = ("the weights of a run without the step",)
    assert found((*WEIGHTS[:2], WEIGHTS[2] + 1e-6)).lacks == wrong
    assert found(WEIGHTS[:2]).lacks == wrong


def test_a_cell_has_variants_that_agree_in_one() -> None:
    soon, late, never = Verdict(Kind.NAMED, 1.0), Verdict(Kind.NAMED, 2.0), Verdict(Kind.HANG)
    one, two, three, four = (Variant(wire, world) for wire in ON_CPUS for world in (2, 4))
    both = "named in 1.0 to 2.0 s"
    assert cell({one: soon, two: late}) == both
    assert cell({one: soon, two: late, three: soon, four: late}) == both
    assert cell({one: soon, two: late, three: never, four: never}) == (
        f"{both} (shared); no end (sockets)"
    )
    assert cell({one: soon, two: never, three: late, four: never}) == (
        f"{both} (2 ranks); no end (4 ranks)"
    )
    assert cell({one: never, two: soon, three: late, four: late}) == (
        f"no end (shared, 2 ranks); {both} (shared, 4 ranks; sockets)"
    )
    assert cell({three: never, four: soon}) == "no end (2 ranks); named in 1.0 s (4 ranks)"
