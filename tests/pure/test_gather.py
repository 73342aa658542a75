"""In-place gathers and staged gathers together give every element exactly once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fullshard.layout import (
    Layout,
    ParamSpec,
    PerParameter,
    Ragged,
    plan_gather,
    plan_param_gather,
)
from tests.pure.layout_model import PADDING, Buffer, elements, layouts, scatter, values


def gathered(layout: Layout, min_numel: int) -> Buffer:
    """Return the unsharded buffer that a gather plan fills."""
    plan = plan_gather(layout, min_numel=min_numel)
    shards = scatter(layout, values(layout))
    unsharded: Buffer = [PADDING] * layout.unsharded_numel
    staging = [x for shard in shards for x in shard[: plan.staged_numel]]
    for copy in plan.copies:
        for in_param, in_staging in elements(copy):
            at = layout.unsharded_offsets[copy.param] + in_param
            assert unsharded[at] is PADDING
            unsharded[at] = staging[in_staging]
    for part in plan.direct:
        found = [
            x for shard in shards for x in shard[part.shard_offset : part.shard_offset + part.numel]
        ]
        place = slice(part.unsharded_offset, part.unsharded_offset + len(found))
        assert all(x is PADDING for x in unsharded[place])
        unsharded[place] = found
    return unsharded


@given(layouts(), st.integers(0, 20))
def test_every_element_comes_to_its_place_once(layout: Layout, min_numel: int) -> None:
    unsharded = gathered(layout, min_numel)
    for offset, elements_of in zip(layout.unsharded_offsets, values(layout), strict=True):
        assert unsharded[offset : offset + len(elements_of)] == elements_of


@given(layouts(), st.integers(1, 20))
def test_small_pieces_are_staged(layout: Layout, min_numel: int) -> None:
    plan = plan_gather(layout, min_numel=min_numel)
    if not layout.zero_copy:
        assert all(part.numel >= min_numel for part in plan.direct)
        assert all(part.shard_offset >= plan.staged_numel for part in plan.direct)


def test_large_parameters_that_divide_evenly_are_gathered_in_place() -> None:
    specs = [ParamSpec("w", (4, 6)), ParamSpec("b", (5,)), ParamSpec("v", (4, 2))]
    layout = PerParameter().build(specs, 2, align=4)
    plan = plan_gather(layout, min_numel=8)
    assert plan.staged_numel == 8  # b and v
    assert {copy.param for copy in plan.copies} == {1, 2}
    (w,) = plan.direct
    assert (w.shard_offset, w.numel, w.unsharded_offset) == (8, 12, 0)


def test_the_ragged_layout_is_gathered_in_place_as_a_whole() -> None:
    layout = Ragged().build([ParamSpec("w", (5, 3)), ParamSpec("b", (5,))], 3, align=4)
    plan = plan_gather(layout, min_numel=10**9)
    assert (plan.staged_numel, plan.copies) == (0, ())
    assert [part.numel for part in plan.direct] == [layout.shard_numel]


def gathered_alone(layout: Layout, param: int) -> Buffer:
    """Return one parameter, from equal slices of the shards, or else from each rank's segment."""
    shards, numel = scatter(layout, values(layout)), layout.params[param].numel
    plan = plan_param_gather(layout, param)
    if plan is None:
        own = [(shards[rank], layout.segments_of(rank)[param]) for rank in range(layout.world)]
        return [x for shard, s in own for x in shard[s.shard_offset : s.shard_offset + s.numel]]
    end = plan.shard_offset + plan.numel
    assert end <= layout.shard_numel
    staging = [x for shard in shards for x in shard[plan.shard_offset : end]]
    if not plan.copies:
        return staging[:numel]
    found: Buffer = [PADDING] * numel
    for copy in plan.copies:
        for in_param, in_staging in elements(copy):
            assert found[in_param] is PADDING
            found[in_param] = staging[in_staging]
    return found


@given(layouts())
def test_a_parameter_comes_whole_by_itself(layout: Layout) -> None:
    for param, elements_of in enumerate(values(layout)):
        if elements_of:
            assert gathered_alone(layout, param) == elements_of


def test_what_one_rank_keeps_is_sent_by_that_rank() -> None:
    specs = [ParamSpec("w", (4, 6)), ParamSpec("v", (5, 4))]
    layout = Ragged("tensor").build(specs, 2, align=4)
    assert [plan_param_gather(layout, param) for param in range(2)] == [None, None]
    plan = plan_param_gather(PerParameter().build(specs, 2, align=4), 1)
    assert plan is not None and (plan.numel, plan.copies) == (12, ())
