"""What an owner does with the tensors of a round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fullshard.optim.draws import SEED, seeded
from fullshard.optim.grain import First, widened
from fullshard.optim.groups import Groups, KeptOptions, numbered
from fullshard.optim.inner import Inner
from fullshard.optim.owned_state import WholeBlock
from fullshard.optim.rounds import Round


def step_round(
    inner: Inner, groups: Groups, one: Round, amp: Mapping[str, Tensor], *, counts: bool
) -> None:
    """Step all tensors of a round that this rank owns, those of groups with a seed one by one.

    Args:
        inner: the optimizer.
        groups: the user's groups.
        one: the round; memory is lent.
        amp: see ``Inner.step``.
        counts: step also if there are none, for the class counts in its groups.
    """
    wholes = one.wholes()
    alone = [at for at in wholes if SEED in groups[one.members[at].owned.group]]
    if not alone:
        if wholes or counts:
            _step(inner, groups, one, wholes, amp)
        return
    before = KeptOptions(groups)
    together = {at: whole for at, whole in wholes.items() if at not in alone}
    if together:
        _step(inner, groups, one, together, amp)
    number_of = {id(param): at for at, (_, param) in enumerate(numbered(groups))}
    for at in alone:
        before.restore()
        owned, number = one.members[at]
        seed, device = groups[owned.group][SEED], owned.param.device
        with seeded(seed, number_of[id(owned.param)], number, device):
            _step(inner, groups, one, {at: wholes[at]}, amp)


def _step(
    inner: Inner,
    groups: Groups,
    one: Round,
    wholes: Mapping[int, WholeBlock],
    amp: Mapping[str, Tensor],
) -> None:
    by_group: list[list[Any]] = [[] for _ in groups]
    for at, whole in wholes.items():
        by_group[one.members[at].owned.group].append(whole)
    inner.set_runs(groups, by_group)
    with widened(inner, _first(inner, one, wholes)):
        if inner.is_eager:
            for group, its in zip(groups, by_group, strict=True):
                for whole in its:
                    if inner.state_of(whole) is None:
                        inner.set_state(whole, inner.first_state(whole, group))
        inner.step(groups, amp)


def _first(inner: Inner, one: Round, wholes: Mapping[int, WholeBlock]) -> list[First]:
    """Return the pieces that have no state yet."""
    found = []
    for at, whole in wholes.items():
        owned, number = one.members[at]
        if owned.units is not None and not inner.state_of(whole):
            found.append(First(whole, owned.piece(number), owned.units))
    return found
