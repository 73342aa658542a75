"""Rounds of a step: matrices travel to their owners, are stepped, and travel back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fullshard.optim.inner import Groups, Inner, Steppable
from fullshard.optim.owned.assign import Cost, Ranks, rounds_of
from fullshard.optim.owned.exchange import BlockPart, Peers, parts_of, to_holders, to_owners
from fullshard.optim.owned.state import OwnedParam
from fullshard.optim.probe import First, widened
from fullshard.tensors import local_part

_EMPTY = torch.empty(0, device="cpu")
_MAX_PLANS = 16


class Member(NamedTuple):
    """A block of a parameter."""

    owned: OwnedParam
    number: int


class Round(NamedTuple):
    """Blocks that are brought to their owners, stepped and written back together.

    Attributes:
        params: the parameters of the blocks.
        members: the blocks.
        mine: indices in ``members`` of the blocks that this rank owns.
        kept: for each of ``mine``, the parts that this rank holds itself.
        sources: who sends gradients and parameters; None if none travels.
        targets: who gets updated parameters; None if none travels.
    """

    params: list[OwnedParam]
    members: list[Member]
    mine: list[int]
    kept: list[list[BlockPart]]
    sources: Peers | None
    targets: Peers | None

    def own_blocks(self) -> dict[int, Steppable]:
        """Return the blocks that this rank owns, by index in ``members``."""
        return {at: self.members[at].owned.own_blocks[self.members[at].number] for at in self.mine}


Step = Callable[[Round, set[int]], None]
"""Steps a round, given the addresses of memory that is released afterwards."""


class Family:
    """Parameters of one mesh.

    Attributes:
        ranks: the ranks of the mesh.
        members: the parameters by their ``id``.
    """

    def __init__(self, ranks: Ranks, members: Mapping[int, OwnedParam], budget_nbytes: int) -> None:
        self.ranks, self.members = ranks, members
        self._budget_nbytes = budget_nbytes
        self._rounds: dict[object, list[Round]] = {}

    def loads(self, cost: Cost) -> dict[int, float]:
        """Return the cost of each rank's matrices."""
        found = dict.fromkeys(self.ranks.numbers, 0.0)
        for one in self.members.values():
            for block, owner in zip(one.blocks, one.owners, strict=True):
                found[self.ranks.numbers[owner]] += float(cost(block.shape))
        return found

    def step(self, grads: Mapping[int, Tensor | None], step: Step) -> None:
        """Bring each parameter with a gradient up to date; ``step`` steps what this rank owns."""
        by_device: dict[torch.device, list[int]] = {}
        found: dict[int, Tensor] = {}
        for number, owned in self.members.items():
            grad = grads.get(number)
            if grad is not None:
                found[id(owned)] = grad
                by_device.setdefault(local_part(owned.param).device, []).append(number)
        for numbers in by_device.values():
            key = tuple((number, self.members[number].group) for number in numbers)
            if key not in self._rounds:
                if len(self._rounds) == _MAX_PLANS:
                    self._rounds.clear()  # other parameters have gradients in each step
                self._rounds[key] = self._plan(numbers)
            for one in self._rounds[key]:
                _run(one, found, step)

    def _plan(self, numbers: Sequence[int]) -> list[Round]:
        members = [
            Member(self.members[number], at)
            for number in numbers
            for at in range(len(self.members[number].blocks))
        ]
        # Equal shapes of one group follow each other, for classes that step them as one batch.
        members.sort(key=lambda one: (one.owned.group, one.owned.blocks[one.number].shape))
        sizes = []
        for owned, at in members:
            nbytes = owned.blocks[at].numel * owned.param.dtype.itemsize
            sizes.append((owned.owners[at], nbytes))
        planned = rounds_of(sizes, len(self.ranks.numbers), self._budget_nbytes)
        return [self._round([members[at] for at in chosen]) for chosen in planned]

    def _round(self, members: list[Member]) -> Round:
        ranks, me = self.ranks, self.ranks.own
        params = list({id(one.owned): one.owned for one in members}.values())
        number_of = {id(owned): number for number, owned in enumerate(params)}
        in_copy, over_all = _Lists(len(ranks.numbers)), _Lists(len(ranks.numbers))
        mine: list[int] = []
        kept: list[list[BlockPart]] = []
        travels = has_copies = False
        for at, (owned, number) in enumerate(members):
            owner, placed, block = owned.owners[number], owned.placed, owned.blocks[number]
            travels |= owner not in ranks.holders(placed, block)
            has_copies |= ranks.num_copies(placed) > 1
            for rank in range(len(ranks.numbers)) if owner == me else (me,):
                region = ranks.region(placed, rank)
                found = parts_of(region, placed.shape, number_of[id(owned)], at, block)
                if rank == owner:
                    mine.append(at)
                    kept.append(found)
                    continue
                for lists in (in_copy, over_all):
                    if lists is over_all or ranks.shares_copy(placed, rank, owner):
                        if owner == me:
                            lists.owned[rank] += found
                        else:
                            lists.held[owner] += found
        return Round(
            params,
            members,
            mine,
            kept,
            in_copy.peers(ranks) if travels else None,
            over_all.peers(ranks) if travels or has_copies else None,
        )


class _Lists:
    """Parts that travel to and from each rank."""

    def __init__(self, num_ranks: int) -> None:
        self.held: list[list[BlockPart]] = [[] for _ in range(num_ranks)]
        self.owned: list[list[BlockPart]] = [[] for _ in range(num_ranks)]

    def peers(self, ranks: Ranks) -> Peers:
        return Peers(ranks.mesh.get_group(), self.held, self.owned)


def _run(one: Round, grads: Mapping[int, Tensor], step: Step) -> None:
    locals_now = [local_part(owned.param).detach() for owned in one.params]
    params = [local.contiguous() for local in locals_now]
    its_grads = [local_part(grads[id(owned)]).detach().contiguous() for owned in one.params]
    blocks, own_views = _assembled(one, params)
    block_grads, _ = _assembled(one, its_grads)
    if one.sources is not None:
        to_owners(one.sources, (its_grads, params), (block_grads, blocks))
    bound = {local.untyped_storage().data_ptr() for local in (*params, *its_grads, *blocks)}
    for at, own in one.own_blocks().items():
        own.bind(blocks[at], block_grads[at])
    try:
        step(one, bound)
        for at, own in one.own_blocks().items():
            stepped = own.tensor.data
            if stepped.data_ptr() != blocks[at].data_ptr():  # the class gave it other memory
                blocks[at].copy_(stepped)
    finally:
        for own in one.own_blocks().values():
            own.release()
    del block_grads
    _write_kept(one, blocks, params, own_views)
    if one.targets is not None:
        to_holders(one.targets, blocks, params)
    for local, written in zip(locals_now, params, strict=True):
        if written is not local and written.data_ptr() != local.data_ptr():
            local.copy_(written)


def _assembled(one: Round, locals_now: Sequence[Tensor]) -> tuple[list[Tensor], set[int]]:
    """Return this rank's blocks, filled with its own parts, and indices of views of locals."""
    blocks = [_EMPTY] * len(one.members)
    number_of = {id(owned): number for number, owned in enumerate(one.params)}
    views: set[int] = set()
    for at, parts in zip(one.mine, one.kept, strict=True):
        owned, number = one.members[at]
        block = owned.blocks[number]
        local = locals_now[number_of[id(owned)]]
        if len(parts) == 1 and parts[0].overlap.numel == block.numel and parts[0].overlap.is_flat:
            start = parts[0].overlap.offset
            blocks[at] = local.view(-1)[start : start + block.numel].view(block.shape)
            views.add(at)
            continue
        blocks[at] = local.new_empty(block.shape)
        for part in parts:
            part.of_block(blocks[at]).copy_(part.of_local(local))
    return blocks, views


def _write_kept(
    one: Round, blocks: Sequence[Tensor], locals_now: Sequence[Tensor], views: set[int]
) -> None:
    for at, parts in zip(one.mine, one.kept, strict=True):
        for part in parts if at not in views else ():
            part.of_local(locals_now[part.param]).copy_(part.of_block(blocks[at]))


def step_round(
    inner: Inner, groups: Groups, one: Round, amp: Mapping[str, Tensor], *, counts: bool
) -> None:
    """Step all tensors of a round that this rank owns.

    Args:
        inner: the optimizer.
        groups: the user's groups.
        one: the round; memory is bound.
        amp: see ``Inner.step``.
        counts: True if the class counts in its groups, so it must step even without tensors.
    """
    blocks = one.own_blocks()
    if not blocks and not counts:
        return
    by_group: list[list[Any]] = [[] for _ in groups]
    for at, own in blocks.items():
        by_group[one.members[at].owned.group].append(own)
    inner.set_runs(groups, by_group)
    with widened(inner, _first(inner, one, blocks)):
        if inner.is_eager:
            for group, its in zip(groups, by_group, strict=True):
                for own in its:
                    if inner.state_of(own) is None:
                        inner.set_state(own, inner.first_state(own, group))
        inner.step(groups, amp)


def _first(inner: Inner, one: Round, blocks: Mapping[int, Steppable]) -> list[First]:
    """Return the pieces that have no state yet."""
    found = []
    for at, own in blocks.items():
        owned, number = one.members[at]
        if owned.units is not None and not inner.state_of(own):
            found.append(First(own, owned.piece(number), owned.units))
    return found
