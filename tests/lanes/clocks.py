"""Vector clocks: which accesses to memory are ordered, whatever the timing.

A *timeline* does its work in order: a stream, the communication stream of a process group (a
*wire*), or the host. A timeline counts its work in *ticks*. Its *clock* holds the ticks of all
timelines that it has waited for: ``clock[t] = n`` means that the work of ``t`` up to tick n is over
before the next work of this timeline. There are four rules:

    do       the host issues work to a timeline:    clock |= host.clock; clock[self] += 1
    record   an event, or the start of a collective, is a copy of a clock
    wait     for an event, or a collective's end:   clock |= event.clock  (pointwise maximum)
    block    the host waits for an event:           host.clock |= event.clock

An access of ``t`` at its tick n *happened before* the next work of a timeline if ``clock[t] >= n``.
Otherwise the two may overlap on a device, even if they ran one after the other here. So a proof
from one run holds for every timing. There are four errors:

    race         two accesses to the same bytes, at least one a write, that are not ordered
    reuse        freed memory returns to the pool of the timeline that allocated it, as in PyTorch's
                 caching allocator. The next allocation of this timeline may get the memory at once,
                 so all earlier accesses must have happened before
    in flight    memory of a collective is freed or written before a wait for the collective;
                 memory that the collective writes must not be read either
    freed        an access to freed memory

Memory of the host has no pool, because its allocator waits for issued work. Reuse is not checked
for memory that a program or autograd uses on several compute streams: both call ``record_stream``.
Accesses by the engine are checked: it does not call
``record_stream``.
"""

from __future__ import annotations

import bisect
import weakref
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.lanes.places import BEFORE, Place

Clock = dict["Timeline", int]

_UNAWAITED = "Nobody has waited for the collective yet."


class RaceError(AssertionError):
    """Work on different lanes is not ordered."""


class Timeline:
    """A sequence of ordered work. See the module's docstring."""

    def __init__(self, name: str, *, computes: bool = False) -> None:
        self.name = name
        self.computes = computes
        self.clock: Clock = {self: 0}

    def __repr__(self) -> str:
        return self.name

    def join(self, clock: Clock) -> None:
        """Order all later work of this timeline after the ticks in ``clock``."""
        for other, tick in clock.items():
            if self.clock.get(other, 0) < tick:
                self.clock[other] = tick

    def tick(self) -> int:
        """Count one operation, and return its tick."""
        self.clock[self] += 1
        return self.clock[self]

    def comes_after(self, access: Access) -> bool:
        """Return whether ``access`` happened before the next operation of this timeline."""
        return self.clock.get(access.by, 0) >= access.tick


@dataclass(eq=False)
class Flight:
    """A collective from its start to the first wait for it."""

    clock: Clock = field(default_factory=dict)
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes ``start`` to ``stop`` of a block, read or written."""

    start: int
    stop: int
    writes: bool
    by: Timeline
    tick: int
    place: Place
    flight: Flight | None = None

    def conflicts(self, other: Access) -> bool:
        """Return whether the two accesses must be ordered."""
        overlap = self.start < other.stop and other.start < self.stop
        is_same = self.flight is not None and self.flight is other.flight  # a gather in place
        return overlap and (self.writes or other.writes) and not is_same

    def __str__(self) -> str:
        what = "written" if self.writes else "read"
        how = " by a collective" if self.flight else ""
        return f"{what}{how} on {self.by} at {self.place}"


@dataclass(eq=False)
class Block:
    """Memory of one allocation."""

    address: int
    nbytes: int
    lane: Timeline
    place: Place
    owner: StorageWeakRef
    on_host: bool = False
    accesses: list[Access] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.nbytes} bytes that {self.lane} allocated at {self.place}"


class Trace:
    """All timelines and all memory of one program, and the races found in the program."""

    def __init__(self) -> None:
        self.host = Timeline("host")
        self.races: list[str] = []
        self.counts: Counter[str] = Counter()
        self.timelines: weakref.WeakSet[Timeline] = weakref.WeakSet()
        self._blocks: dict[int, Block] = {}  # by address
        self._addresses: list[int] = []  # sorted
        self._shared: set[Block] = set()  # touched by another timeline than their own
        self._pools: dict[Timeline, dict[Timeline, tuple[Access, Block]]] = {}
        self._found: set[tuple[Place, Place]] = set()

    # memory

    def block_at(self, address: int) -> Block | None:
        """Return the block that contains ``address``."""
        index = bisect.bisect(self._addresses, address) - 1
        if index < 0:
            return None
        block = self._blocks[self._addresses[index]]
        if address >= block.address + block.nbytes:
            return None
        if block.owner.expired():
            self._retire(block, None)
            return None
        return block

    def allocate(
        self, storage: torch.UntypedStorage, lane: Timeline, place: Place, *, on_host: bool
    ) -> Block:
        """Record new memory of ``lane``, which may reuse the memory that it freed last."""
        self.collect()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        for number in self._overlapping(address, nbytes):
            self._retire(self._blocks[number], place)
        block = Block(address, nbytes, lane, place, StorageWeakRef(storage), on_host)
        self._blocks[address] = block
        bisect.insort(self._addresses, address)
        self.counts["storages"] += 1
        if not on_host and place is not BEFORE:
            self._reuse(lane, place)
            # Work that is ordered after all work issued to ``lane`` so far may use the memory.
            block.accesses.append(Access(0, nbytes, True, lane, lane.clock[lane], place))
        return block

    def free(self, block: Block, place: Place) -> None:
        """Return the memory to the pool it came from."""
        self._retire(block, place)

    def collect(self) -> None:
        """Free blocks without references.

        Most calls look at blocks that several lanes have used; every 256th storage, at all.
        """
        seldom = self.counts["storages"] % 256 == 0
        blocks = self._blocks.values() if seldom else self._shared
        for block in [block for block in blocks if block.owner.expired()]:
            self._retire(block, None)

    def _overlapping(self, address: int, nbytes: int) -> list[int]:
        first = bisect.bisect_left(self._addresses, address)
        last = bisect.bisect_left(self._addresses, address + nbytes)
        return self._addresses[first:last]

    def _retire(self, block: Block, place: Place | None) -> None:
        del self._blocks[block.address]
        self._addresses.pop(bisect.bisect_left(self._addresses, block.address))
        self._shared.discard(block)
        if block.on_host:
            return
        pool = self._pools.setdefault(block.lane, {})
        for access in block.accesses:
            if access.flight is not None and access.flight.is_open:
                where = f" at {place}" if place else ""
                text = f"{block}: freed{where} while in flight:\n  {access}\n{_UNAWAITED}"
                self._report(access, place or access.place, text)
                continue
            last = pool.get(access.by)
            if last is None or last[0].tick < access.tick:
                pool[access.by] = (access, block)

    def _reuse(self, lane: Timeline, place: Place) -> None:
        for access, block in self._pools.pop(lane, {}).values():
            engine = access.place.inner.startswith("fullshard/engine/")
            told = lane.computes and access.by.computes and not engine
            if not told and access.by is not lane and not lane.comes_after(access):
                self._report(access, place, (
                    f"{block}: freed, and given to {lane} again while it may still be\n  {access}\n"
                    f"  allocated next on {lane} at {place}\n{_missing(lane, access)}"
                ))  # fmt: skip

    # accesses

    def issue(self, lane: Timeline) -> int:
        """Issue one operation of the host to ``lane``, and return its tick."""
        if lane is not self.host:
            lane.join(self.host.clock)
        self.timelines.add(lane)
        self.counts["operations"] += 1
        return lane.tick()

    def book(self, block: Block, new: Access) -> None:
        """Compare ``new`` with all earlier accesses to ``block``, and record it."""
        kept = []
        for old in block.accesses:
            if old.conflicts(new):
                in_flight = old.flight is not None and old.flight.is_open
                if in_flight or (old.by is not new.by and not new.by.comes_after(old)):
                    self._conflict(block, old, new, in_flight=in_flight)
                if new.writes and new.start <= old.start and old.stop <= new.stop:
                    continue  # work ordered after the new one is ordered after the old one too
            elif old.by is new.by and (old.start, old.stop) == (new.start, new.stop):
                continue
            kept.append(old)
        kept.append(new)
        block.accesses = kept
        if new.by is not block.lane:
            self._shared.add(block)
        self.counts["accesses"] += 1

    def _conflict(self, block: Block, old: Access, new: Access, *, in_flight: bool) -> None:
        why = _missing(new.by, old)
        if in_flight:
            why = _UNAWAITED
        span = f"bytes {max(old.start, new.start)} to {min(old.stop, new.stop)} of {block}"
        self._report(old, new.place, f"{span}:\n  {old}\n  {new}\n{why}")

    def _report(self, old: Access, place: Place, text: str) -> None:
        if (old.place, place) not in self._found:
            self._found.add((old.place, place))
            self.races.append(text)


def _missing(waiter: Timeline, access: Access) -> str:
    known = waiter.clock.get(access.by, 0)
    return (
        f"Nothing makes {waiter} wait for {access.by} in between: it knows of its work up to tick "
        f"{known}, this was {access.tick}. (A wire knows what the lane knows that issued to it.)"
    )
