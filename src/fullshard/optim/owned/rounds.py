"""Rounds of a step: matrices travel to their owners, are stepped, and travel back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from fullshard.optim.inner import Groups, Inner, Steppable
from fullshard.optim.owned.assign import Cost, OwnedBlock, Ranks, rounds_of
from fullshard.optim.owned.state import OwnedParam
from fullshard.optim.probe import First, widened
from fullshard.tensors import local_part
from fullshard.tensors.transfer import Part, exchange, parts_of

_MAX_PLANS = 16


class Member(NamedTuple):
    """A block of a parameter."""

    owned: OwnedParam
    number: int

    @property
    def block(self) -> OwnedBlock:
        """The position and shape of the block."""
        return self.owned.blocks[self.number]

    @property
    def owner(self) -> int:
        """Index of the rank that owns the block."""
        return self.owned.owners[self.number]

    @property
    def steppable(self) -> Steppable:
        """The parameter of the inner optimizer, at the owner."""
        return self.owned.own_blocks[self.number]


class Peers:
    """The parts that travel between this rank and each rank of a mesh.

    Parts that an owner holds itself do not travel.

    Attributes:
        held: by owner, this rank's parts of the owner's blocks.
        owned: by holder, the holder's parts of this rank's blocks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.held: list[list[Part[int]]] = [[] for _ in ranks.numbers]
        self.owned: list[list[Part[int]]] = [[] for _ in ranks.numbers]

    def to_owners(self, *kinds: tuple[Sequence[Tensor], Mapping[int, Tensor]]) -> None:
        """Fill the blocks that this rank owns.

        ``kinds``: for each kind of tensor, such as gradients, the contiguous local tensors by
        parameter, and the contiguous blocks.
        """
        sent = [[p.of_local(own[p.local]) for own, _ in kinds for p in ps] for ps in self.held]
        taken = [[p.of_block(its[p.block]) for _, its in kinds for p in ps] for ps in self.owned]
        exchange(self._ranks.mesh.get_group(), sent, taken, kinds[0][0][0].device)

    def to_holders(self, locals_now: Sequence[Tensor], blocks: Mapping[int, Tensor]) -> None:
        """Write the blocks to the local tensors of all ranks; the inverse of ``to_owners``."""
        sent = [[part.of_block(blocks[part.block]) for part in parts] for parts in self.owned]
        taken = [[part.of_local(locals_now[part.local]) for part in parts] for parts in self.held]
        exchange(self._ranks.mesh.get_group(), sent, taken, locals_now[0].device)


class Round:
    """Blocks that are brought to their owners, stepped and written back together.

    Attributes:
        params: the parameters of the blocks.
        own: the blocks that this rank owns, by index among the blocks of the round.
    """

    def __init__(self, ranks: Ranks, members: Sequence[Member]) -> None:
        me = ranks.own
        self.params = list({id(one.owned): one.owned for one in members}.values())
        self.own = {at: one for at, one in enumerate(members) if one.owner == me}
        self._kept: dict[int, list[Part[int]]] = {}  # of own blocks, the parts that lie here
        self._number_of = {id(owned): number for number, owned in enumerate(self.params)}
        in_copy, over_all = Peers(ranks), Peers(ranks)
        travels = has_copies = False
        for at, one in enumerate(members):
            placed, owner = one.owned.placed, one.owner
            travels |= owner not in ranks.holders(placed, one.block)
            has_copies |= ranks.num_copies(placed) > 1
            for rank in range(len(ranks.numbers)) if owner == me else (me,):
                region = ranks.region(placed, rank)
                number = self._number_of[id(one.owned)]
                found = parts_of(number, region, at, one.block.region(placed.shape))
                if rank == owner:
                    self._kept[at] = found
                    continue
                for peers in (in_copy, over_all):
                    if peers is over_all or ranks.shares_copy(placed, rank, owner):
                        parts = peers.owned[rank] if owner == me else peers.held[owner]
                        parts += found
        self._sources = in_copy if travels else None
        self._targets = over_all if travels or has_copies else None

    @contextmanager
    def bound(self, grads: Mapping[int, Tensor | None]) -> Iterator[set[int]]:
        """Bring own blocks here for a step, and the stepped ones back to all ranks.

        Yields addresses of memory that is released afterwards.

        Args:
            grads: gradients by ``id`` of their parameters.
        """
        locals_now = [local_part(owned.param).detach() for owned in self.params]
        params = [local.contiguous() for local in locals_now]
        given = [grads[id(owned.param)] for owned in self.params]
        its_grads = [local_part(one).detach().contiguous() for one in given if one is not None]
        blocks, block_grads = self._assembled(params), self._assembled(its_grads)
        if self._sources is not None:
            self._sources.to_owners((its_grads, block_grads), (params, blocks))
        for at, one in self.own.items():
            one.steppable.bind(blocks[at], block_grads[at])
        held = (*params, *its_grads, *blocks.values())
        try:
            yield {local.untyped_storage().data_ptr() for local in held}
            for at, one in self.own.items():
                stepped = one.steppable.tensor.data
                if stepped.data_ptr() != blocks[at].data_ptr():  # the class gave it other memory
                    blocks[at].copy_(stepped)
        finally:
            for one in self.own.values():
                one.steppable.release()
        del block_grads
        for at, parts in self._kept.items():
            for part in parts:
                own = part.of_local(params[part.local])
                if own[0].data_ptr() != blocks[at].data_ptr():  # no view of it
                    torch._foreach_copy_(own, part.of_block(blocks[at]))
        if self._targets is not None:
            self._targets.to_holders(params, blocks)
        for local, written in zip(locals_now, params, strict=True):
            if written is not local and written.data_ptr() != local.data_ptr():
                local.copy_(written)

    def _assembled(self, locals_now: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return own blocks, filled with the parts that lie here, or views of local tensors."""
        blocks: dict[int, Tensor] = {}
        for at, parts in self._kept.items():
            one = self.own[at]
            local, block = locals_now[self._number_of[id(one.owned)]], one.block
            in_place = parts[0].as_slice(local, block.numel) if parts else None
            if in_place is not None:
                blocks[at] = in_place.view(block.shape)
                continue
            blocks[at] = local.new_empty(block.shape)
            for part in parts:
                torch._foreach_copy_(part.of_block(blocks[at]), part.of_local(local))
        return blocks


class Family:
    """Parameters of one mesh.

    Attributes:
        ranks: the ranks of the mesh.
        members: the parameters by their ``id``.
        loads: the cost of each rank's matrices; empty for plain tensors.
    """

    def __init__(
        self, ranks: Ranks, members: Mapping[int, OwnedParam], budget_nbytes: int, cost: Cost
    ) -> None:
        self.ranks, self.members = ranks, members
        self.loads = {} if ranks.is_alone else dict.fromkeys(ranks.numbers, 0.0)
        for one in members.values() if self.loads else ():
            for block, owner in zip(one.blocks, one.owners, strict=True):
                self.loads[ranks.numbers[owner]] += float(cost(block.shape))
        self._budget_nbytes = budget_nbytes
        self._rounds: dict[object, list[Round]] = {}

    def rounds(self, grads: Mapping[int, Tensor | None]) -> Iterator[Round]:
        """Yield the rounds that step all parameters with gradients."""
        by_device: dict[torch.device, list[int]] = {}
        for number, owned in self.members.items():
            if grads.get(number) is not None:
                by_device.setdefault(local_part(owned.param).device, []).append(number)
        for numbers in by_device.values():
            key = tuple((number, self.members[number].group) for number in numbers)
            if key not in self._rounds:
                if len(self._rounds) == _MAX_PLANS:
                    self._rounds.clear()  # other parameters have gradients in each step
                self._rounds[key] = self._plan(numbers)
            yield from self._rounds[key]

    def _plan(self, numbers: Sequence[int]) -> list[Round]:
        params = [self.members[number] for number in numbers]
        members = [Member(owned, at) for owned in params for at in range(len(owned.blocks))]
        # Equal shapes of one group follow each other, for classes that step them as one batch.
        members.sort(key=lambda one: (one.owned.group, one.block.shape))
        sizes = [(one.owner, one.block.numel * one.owned.param.dtype.itemsize) for one in members]
        planned = rounds_of(sizes, len(self.ranks.numbers), self._budget_nbytes)
        return [Round(self.ranks, [members[at] for at in chosen]) for chosen in planned]


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
    if not one.own and not counts:
        return
    own = [member.steppable for member in one.own.values()]
    for run, member in zip(own, one.own.values(), strict=True):
        run.group = member.owned.group
    inner.set_runs(groups, own)
    pieces = [
        First(member.steppable, member.owned.piece(member.number), member.owned.units)
        for member in one.own.values()
        if member.owned.units is not None and not inner.state_of(member.steppable)
    ]
    with widened(inner, pieces):
        for run in own if inner.is_eager else ():
            if inner.state_of(run) is None:
                inner.set_state(run, inner.first_state(run, groups[run.group]))
        inner.step(groups, amp)
