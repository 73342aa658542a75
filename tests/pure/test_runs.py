"""Runs join all neighbours, and nothing else."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fullshard.optim.flat.plan import Position, find_runs

numbered = st.builds(Position, st.sampled_from("ab"), st.integers(0, 12))
unnumbered = st.builds(Position, st.sampled_from("xy"), st.none())
places = st.lists(st.none() | numbered | unnumbered, max_size=30)


@given(places)
def test_every_parameter_is_in_one_run(given: list[Position | None]) -> None:
    runs = find_runs(given)
    assert sorted(index for run in runs for index in run) == list(range(len(given)))
    assert runs == sorted(runs)


@given(places)
def test_members_of_a_run_are_neighbours(given: list[Position | None]) -> None:
    for run in find_runs(given):
        for one, two in pairwise(given[index] for index in run):
            assert one is not None and two is not None and one.line == two.line
            assert (one.number is None) == (two.number is None)
            assert one.number is None or one.number + 1 == two.number


@given(st.lists(st.none() | numbered | unnumbered, max_size=30, unique=True))
def test_no_two_runs_could_be_one(given: list[Position | None]) -> None:
    ends = [(given[run[0]], given[run[-1]]) for run in find_runs(given)]
    for first, _ in ends:
        for _, last in ends:
            if first is None or last is None or first.line != last.line:
                continue
            assert (first.number is None) == (last.number is None)
            assert first.number is None or last.number is None or last.number + 1 != first.number


def test_runs_follow_memory_and_not_the_order_of_parameters() -> None:
    order = [
        Position("a", 2),
        Position("a", 0),
        None,
        Position("b", 1),
        Position("a", 1),
        Position("a", 4),
    ]
    assert find_runs(order) == [(1, 4, 0), (2,), (3,), (5,)]


def test_what_takes_no_room_is_next_to_everyone_on_its_line() -> None:
    order = [Position("a", None), Position("b", 0), Position("a", None), None, Position("a", None)]
    assert find_runs(order) == [(0, 2, 4), (1,), (3,)]


def test_parameters_in_one_place_step_one_after_the_other() -> None:
    assert find_runs([Position("a", 0), Position("a", 0), Position("a", 1)]) == [(0,), (1, 2)]


def test_nothing_makes_no_run() -> None:
    assert find_runs([]) == []
