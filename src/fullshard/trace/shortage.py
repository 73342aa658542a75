"""Suggest changes that need less memory, after a rank ran out of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from fullshard.plan.text import in_bytes
from fullshard.trace.steps import NO_UNIT

NUM_WAYS = 3

_GATHERED = ("unsharded", "gather_output", "all_gather_input")


class Way(NamedTuple):
    """A change that would need less memory."""

    what: str
    saves_nbytes: int
    costs: str
    suffices: bool | None
    """True if the change saves at least the size of the failed allocation; None if unknown."""


def ways(rank: Mapping[str, Any]) -> list[Way]:
    """Return at most three ways to need less memory, for a rank that ran out of memory.

    Ways that suffice come first; among equals, the cheaper way comes first.
    """
    tried = rank["shortage"]["tried_nbytes"]
    found = [
        Way(what, saves, costs, None if tried is None else saves >= tried)
        for what, saves, costs in _in_order_of_cost(rank)
        if saves > 0
    ]
    return sorted(found, key=lambda way: way.suffices is False)[:NUM_WAYS]


def _in_order_of_cost(rank: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    shortage, units = rank["shortage"], rank["units"]
    whole = _by_unit(shortage, *_GATHERED)
    in_use = {shortage["where"]} | {n for n, unit in enumerate(units) if unit["encloses"]}
    kept = {n for n in whole if units[n]["after_forward"] == "keep"} - in_use
    ahead = whole.keys() - kept - in_use
    reducing = sorted(_by_unit(shortage, "reduce_input").values())
    rests = sum(n for _, kind, n in shortage["held"] if kind in ("parameters", "gradients"))
    shards = max(unit["shards"] for unit in units)
    largest = max((unit["unsharded_nbytes"] for unit in units if not unit["encloses"]), default=0)
    return [
        (
            f"set_prefetch_budget({largest}): gather no unit ahead of its time",
            sum(whole[n] for n in ahead),
            "every gather is exposed in full",
        ),
        (
            "set_reduction_budget(None): one reduction at a time",
            sum(reducing[:-1]),
            "reductions overlap with the backward of one unit only",
        ),
        (
            f"reshard_after_forward=True for the {len(kept)} units that stay whole",
            sum(whole[n] for n in kept),
            f"one more gather of {in_bytes(sum(whole[n] for n in kept))} in each backward",
        ),
        (
            "activation checkpoints (torch.utils.checkpoint) around the blocks",
            _others(rank),
            "one more forward of what is checkpointed, about a third more computation; saves up "
            "to the figure, which includes optimizer state and whatever else PyTorch holds",
        ),
        (
            f"{2 * shards} shards instead of {shards}",
            rests // 2,
            "twice the ranks; half of the optimizer's state is saved besides",
        ),
        (
            "offload_policy=CPUOffloadPolicy()",
            rests,
            "shards and gradients cross the bus in each step, and the optimizer runs on the host",
        ),
    ]


def _by_unit(shortage: Mapping[str, Any], *kinds: str) -> Counter[int]:
    found: Counter[int] = Counter()
    for unit, kind, nbytes in shortage["held"]:
        if kind in kinds and unit != NO_UNIT:
            found[unit] += nbytes
    return found


def _others(rank: Mapping[str, Any]) -> int:
    """Return the known bytes that are neither shards nor buffers."""
    shortage = rank["shortage"]
    if shortage["allocated_nbytes"] is not None:
        return max(0, int(shortage["allocated_nbytes"] - sum(n for *_, n in shortage["held"])))
    plan = rank.get("plan") or {}
    return int(plan.get("peak", {}).get("held", {}).get("activations", 0))
