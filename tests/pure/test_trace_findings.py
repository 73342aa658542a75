"""Findings of a trace in plain words, from rank files made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from fullshard.trace.findings import (
    exposed,
    findings,
    missed_guesses,
    stragglers,
    tiny_units,
    unequal_units,
)
from fullshard.trace.shortage import ways
from fullshard.trace.spans import spans
from fullshard.trace.summary import first_difference
from tests.pure.trace_files import MB, action, rank_file, step, total, unit

BUDGET = "set_prefetch_budget({})"


def gathered(exposed_s: float, budget: int | None = None, ends: str = "wait") -> Any:
    """Return a rank file in which block 2 is gathered during block 1, and then waited for."""
    work = [["forward", 0, 0.0, 0.01], ["forward", 1, 0.01, 0.01], ["forward", 2, 0.02, 0.01]]
    actions = [action("unshard", 2, 0.01), action(ends, 2, 0.02, exposed_s)]
    engines = [{"prefetch_budget": budget, "reduction_budget": None}]
    return rank_file(steps=[step(work=work, actions=actions)] * 2, engines=engines)


def test_an_exposed_gather_names_what_the_budget_holds_and_what_more_costs() -> None:
    (found,) = exposed(gathered(0.0012), "gather")
    assert found.text == (
        "blocks.2: gather exposed 1.2 ms a step; the prefetch budget holds one unit ahead, and one "
        "more would hide this and cost 32 MB"
    )
    assert found.change == BUDGET.format(96 * MB)
    assert found.cost_s == pytest.approx(0.0012)


def test_the_wait_for_an_unused_gather_is_exposed_too() -> None:
    file = gathered(0.0012, ends="finish_gather")
    assert exposed(file, "gather") == exposed(gathered(0.0012), "gather")
    found = {(span.lane, span.what) for span in spans(file["steps"][0])}
    assert {("gathers", "finish_gather"), ("exposed", "finish_gather")} <= found


def test_a_budget_of_bytes_grows_by_the_unit() -> None:
    (found,) = exposed(gathered(0.0012, 70 * MB), "gather")
    assert "the prefetch budget holds 70 MB, 2 such units, and" in found.text
    assert found.change == BUDGET.format(102 * MB)


def test_what_would_not_be_hidden_is_not_promised() -> None:
    (found,) = exposed(gathered(0.015), "gather")
    assert "one more would hide 10 ms of this at most" in found.text


def test_the_first_gather_of_a_step_has_nothing_to_hide_behind() -> None:
    actions = [action("unshard", 0, 0.0), action("wait", 0, 0.001, 0.02)]
    (found,) = exposed(rank_file(steps=[step(work=[], actions=actions)]), "gather")
    assert "nothing runs before it that could hide it" in found.text


def test_a_short_wait_is_no_finding() -> None:
    assert exposed(gathered(0.0009), "gather") == []


def test_many_exposed_units_are_told_in_one_line() -> None:
    actions = [action("unshard", n, 0.0) for n in range(8)]
    actions += [action("wait", n, 0.01, 0.002) for n in range(8)]
    units = [unit(f"blocks.{n}") for n in range(8)]
    told = exposed(rank_file(steps=[step(actions=actions)], units=units), "gather")
    assert len(told) == 4
    assert told[-1].text == "gathers of 5 more units are exposed, 10 ms a step together"
    assert told[-1].cost_s == pytest.approx(0.01)


def test_one_value_is_given_for_one_call() -> None:
    work = [["forward", n, 0.01 * n, 0.01] for n in range(8)]
    actions = [action("unshard", n, 0.01 * n - 0.005) for n in range(2, 8)]
    actions += [action("wait", n, 0.01 * n, 0.001 * n) for n in range(2, 8)]
    units = [unit(f"blocks.{n}", (40 if n == 3 else 32) * MB) for n in range(8)]
    ranks = rank_file(steps=[step(work=work, actions=actions)], units=units)
    (found,) = exposed(ranks, "gather")
    assert found.text == (
        "gathers of 6 units exposed 27 ms a step, most in blocks.7 (7 ms), blocks.6 (6 ms), "
        "blocks.5 (5 ms); the prefetch budget holds one unit ahead, and one more would hide this "
        "and cost 40 MB"
    )
    assert found.change == BUDGET.format(120 * MB)
    assert found.cost_s == pytest.approx(0.027)


def test_many_small_units_are_the_first_cause() -> None:
    units = [unit(f"blocks.{n}", 38_000) for n in range(102)]
    waits = [{"gathers": 2, "gather": total(0.0005, 1), "reduction": total()} for _ in units]
    one = rank_file(units=units, totals=waits)
    found, *_ = findings([one])
    assert found.text == (
        "102 units with a median of 38 kB: computation waits 51 ms a step for gathers and "
        "reductions, probably more for the latency of each message than for its bytes"
    )
    assert found.change == (
        "put neighbouring blocks into one unit: "
        "shard_blocks(model, plan=fullshard.Choice(blocks_per_unit=8))"
    )
    large = [unit(f"blocks.{n}", 2 * MB) for n in range(102)]
    assert findings([rank_file(units=large, totals=waits)]) == []
    assert tiny_units(rank_file(units=units[:7], totals=waits[:7])) == []
    assert tiny_units(rank_file(units=units, totals=waits, steps=[step(duration_s=1.0)])) == []


def reduced(at_s: float) -> Any:
    work = [["backward", 2, 0.0, 0.03], ["backward", 1, 0.03, 0.03]]
    return rank_file(steps=[step(work=work, actions=[action("finish_reduce", 2, at_s, 0.002)])])


def test_an_exposed_reduction_names_the_budget() -> None:
    (found,) = exposed(reduced(0.03), "reduction")
    assert found.text == (
        "blocks.2: reduction exposed 2 ms a step; the reduction budget holds one reduction, and "
        "one more in flight would cost 32 MB"
    )
    assert found.change == f"set_reduction_budget({64 * MB})"


def test_a_reduction_after_backward_has_nothing_to_hide_behind() -> None:
    (found,) = exposed(reduced(0.07), "reduction")
    assert "backward is over by then" in found.text


def test_missed_guesses_name_what_was_predicted_and_what_came() -> None:
    found = missed_guesses(rank_file(missed=[[1, 0, 2, 3], [2, 1, -1, 5]]))
    assert [one.unit for one in found] == ["blocks.2", "blocks.1"]
    assert found[0].text == (
        "blocks.2 was gathered in vain 5 times: expected after blocks.1, but the end of the pass "
        "came; 160 MB in all"
    )
    assert "but blocks.2 came" in found[1].text


def test_who_waits_least_is_whom_the_others_wait_for() -> None:
    ranks = [rank_file(rank, waited_s=0.001 if rank == 2 else 0.02) for rank in range(4)]
    (found,) = stragglers(ranks)
    assert found.text == "rank 2 (here) waits 1 ms a step, the others 20 ms: they wait for it"
    assert stragglers([rank_file(rank, waited_s=0.02) for rank in range(4)]) == []
    assert stragglers(ranks[:1]) == []


def test_units_of_unlike_sizes() -> None:
    units = [unit(f"blocks.{n}") for n in range(6)]
    assert unequal_units(units) == []
    large, small = unequal_units([*units, unit("head", 200 * MB), unit("norm", MB)])
    assert large.text == "far larger than the median unit (32 MB): head (200 MB)"
    assert small.text == "far smaller than the median unit (32 MB): norm (1 MB)"
    assert unequal_units([*units, unit("(root)", MB)]) == []


def test_what_costs_most_comes_first() -> None:
    one = gathered(0.0012)
    other = rank_file(1, waited_s=0.05)
    assert [found.kind for found in findings([one, other])] == ["straggler", "gather"]


def test_the_first_difference_from_the_plan() -> None:
    names = ["blocks.0", "blocks.1"]
    assert first_difference(["fence", "unshard 0"], ["fence", "unshard 0"], names) is None
    assert first_difference(["fence", "unshard 1"], ["fence", "unshard 0"], names) == {
        "index": 1,
        "recorded": "unshard blocks.1",
        "planned": "unshard blocks.0",
    }
    assert first_difference(["fence"], ["fence", "unshard 0"], names) == {
        "index": 1,
        "recorded": "nothing more",
        "planned": "unshard blocks.0",
    }


def short(tried: int | None, **other: Any) -> Any:
    held = [[0, "unsharded", 32 * MB], [1, "unsharded", 32 * MB], [2, "reduce_input", 32 * MB]]
    held += [[1, "reduce_input", 20 * MB], [0, "parameters", 16 * MB]]
    shortage = {"message": "out", "where": 0, "tried_nbytes": tried, "held": held}
    return rank_file(shortage={"allocated_nbytes": None, **shortage, **other})


def test_the_cheapest_ways_below_come_first() -> None:
    first, second, third = ways(short(None))
    assert (first.what.split("(")[0], first.saves_nbytes) == ("set_prefetch_budget", 32 * MB)
    assert (second.what.split("(")[0], second.saves_nbytes) == ("set_reduction_budget", 20 * MB)
    assert third.what == "4 shards instead of 2" and third.saves_nbytes == 8 * MB
    assert {way.suffices for way in (first, second, third)} == {None}


def test_ways_that_suffice_come_before_cheaper_ones_that_do_not() -> None:
    found = ways(short(25 * MB, allocated_nbytes=300 * MB))
    assert [way.suffices for way in found] == [True, True, False]
    assert found[1].what.startswith("activation checkpoints")
    assert found[1].saves_nbytes == (300 - 132) * MB


def test_units_that_stay_whole_can_be_resharded() -> None:
    one = short(None)
    one["units"][1]["after_forward"] = "keep"
    assert ways(one)[1].what == "reshard_after_forward=True for the 1 units that stay whole"
