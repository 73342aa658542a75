"""The checker finds what is planted, and finds nothing in programs of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard import comm
from fullshard._torch import memory as _memory
from fullshard.comm import Pending
from fullshard.device import Buffer, BufferKind, Lane, StorageMeter, host_tensor
from fullshard.device.streams import StreamLanes
from fullshard.engine import spec as bucket_spec
from fullshard.tensors import local_part
from tests.lanes.checked import checked
from tests.lanes.checker import Checker
from tests.lanes.clocks import RaceError
from tests.lanes.fake import Stream
from tests.lanes.programs import PROGRAMS
from tests.lanes.programs.base import LAYOUTS
from tests.lanes.solo import solo
from tests.lanes.wire import TracedWire
from tests.ranks.net import make, shard


@contextmanager
def watched(*expected: str) -> Iterator[Checker]:
    """The block has one race, which is told with these words; or none."""
    checker = Checker()
    with checker.attached():
        yield checker
    races = checker.trace.races
    assert len(races) == bool(expected), races
    for words in expected:
        assert words in races[0]


def lane(checker: Checker) -> Stream:
    """One of ours, for which nobody tells the allocator."""
    stream = checker.accelerator.Stream()
    stream.timeline.computes = False
    return stream


# Planted races, rule by rule, each beside what mends it.


@pytest.mark.parametrize("joined", [True, False])
def test_a_race_of_two_streams(joined: bool) -> None:
    told = () if joined else ("written on compute at tests/lanes/test_lanes.py", "read on stream 1")
    with watched(*told) as checker:
        other = checker.accelerator.Stream()
        x = torch.zeros(8).add_(1)
        if joined:
            other.wait_stream(checker.accelerator.current_stream())
        with checker.accelerator.stream(other):
            x.sum()


def test_reads_do_not_race_and_parts_are_told_apart() -> None:
    with watched() as checker:
        other = checker.accelerator.Stream()
        x = torch.zeros(8)
        other.wait_stream(checker.accelerator.current_stream())
        x.sum()
        x[4:].add_(1)
        with checker.accelerator.stream(other):
            x[:4].sum()


def test_parts_with_a_storage_of_their_own_are_the_same_memory() -> None:
    with watched("written on compute", "read on stream 1") as checker:
        other = checker.accelerator.Stream()
        x = torch.zeros(8)
        part = _memory.own_part(x, 4, (4,))
        other.wait_stream(checker.accelerator.current_stream())
        part.add_(1)
        with checker.accelerator.stream(other):
            x.sum()


def test_an_event_that_was_not_recorded_orders_nothing() -> None:
    with watched("read on stream 1") as checker:
        other, event = checker.accelerator.Stream(), checker.accelerator.Event()
        x = torch.zeros(8)
        other.wait_event(event)
        with checker.accelerator.stream(other):
            x.sum()


def test_what_is_issued_after_a_record_is_not_waited_for() -> None:
    with watched("written on compute", "read on stream 1") as checker:
        other, x = checker.accelerator.Stream(), torch.zeros(8)
        event = checker.accelerator.current_stream().record_event()
        x.add_(1)
        other.wait_event(event)
        with checker.accelerator.stream(other):
            x.sum()


@pytest.mark.parametrize("joined", [True, False])
def test_memory_is_given_again_while_another_stream_reads_it(joined: bool) -> None:
    """The join may come after it was freed, if it comes before the next allocation."""
    told = () if joined else ("freed, and given to compute again", "read on stream 1")
    with watched(*told) as checker:
        other = lane(checker)
        x = torch.zeros(8)
        other.wait_stream(checker.accelerator.current_stream())
        with checker.accelerator.stream(other):
            x.sum()
        del x
        if joined:
            checker.accelerator.current_stream().wait_stream(other)
        torch.zeros(3)


def test_memory_that_a_buffer_gave_back_is_its_own_streams() -> None:
    with watched("freed, and given to stream 1 again", "read on compute") as checker:
        accelerator = checker.accelerator
        gather, compute = lane(checker), accelerator.current_stream()
        with accelerator.stream(gather):
            buffer = new_buffer()
            buffer.tensor.zero_()
        compute.wait_stream(gather)
        buffer.tensor.sum()
        buffer.free()
        with accelerator.stream(gather):
            buffer.allocate()


def test_memory_that_is_not_there() -> None:
    with watched() as checker, pytest.raises(RaceError, match="while its memory is freed"):
        buffer = new_buffer()
        buffer.free()
        assert checker.trace.races == []
        buffer.tensor.sum()


def new_buffer() -> Buffer:
    device = torch.device("cpu")
    return Buffer(8, torch.float32, device, kind=BufferKind.UNSHARDED, meter=StorageMeter())


def written(output: Tensor, source: Tensor) -> None:
    source.zero_()


def read(output: Tensor, source: Tensor) -> None:
    output.sum()


@pytest.mark.parametrize("touch", [written, read])
@pytest.mark.parametrize("waited", [True, False])
def test_memory_of_a_collective_in_flight(touch: Any, waited: bool) -> None:
    told = () if waited else ("by a collective on wire 1", "Nobody has waited for the collective")
    with watched(*told), solo(2):
        wire = comm.collectives_of(dist.init_device_mesh("cpu", (2,)))
        output, source = torch.empty(8), torch.zeros(4)
        pending = wire.all_gather([output], [source])
        source.sum()  # who only reads what is only read does no harm
        if waited:
            pending.wait()
        touch(output, source)
        pending.wait()


def test_memory_of_a_collective_is_freed_in_flight() -> None:
    with watched("freed while in flight"), solo(2):
        wire = comm.collectives_of(dist.init_device_mesh("cpu", (2,)))
        pending = wire.all_reduce_mean(torch.zeros(4))
        torch.zeros(4)
        pending.wait()


@pytest.mark.parametrize("waited", [True, False])
def test_the_host_writes_what_a_copy_still_reads(waited: bool) -> None:
    told = () if waited else ("read on compute", "written on host")
    with watched(*told) as checker:
        host, device = bucket_spec.host_tensor(8, torch.float32, pinned=True), torch.zeros(8)
        host.zero_()
        device.copy_(host, non_blocking=True)
        if waited:
            checker.accelerator.current_stream().record_event().synchronize()
        host.zero_()


def test_what_the_host_waited_for_everybody_has_waited_for() -> None:
    with watched() as checker:
        other, x = checker.accelerator.Stream(), torch.zeros(8)
        x.sum().item()
        with checker.accelerator.stream(other):
            x.add_(1)


def test_nothing_stays_patched() -> None:
    before = (torch.UntypedStorage.resize_, Tensor.tolist, bucket_spec.host_tensor)
    with watched():
        pass
    assert before == (torch.UntypedStorage.resize_, Tensor.tolist, host_tensor)


def test_memory_that_the_program_uses_on_two_streams_is_its_own_affair() -> None:
    with watched() as checker:
        other = checker.accelerator.Stream()
        x = torch.zeros(8)
        other.wait_stream(checker.accelerator.current_stream())
        with checker.accelerator.stream(other):
            x.sum()
        del x
        torch.zeros(3)


# Autograd on two streams.


@pytest.mark.parametrize("joined", [True, False])
def test_backward_runs_where_forward_ran(joined: bool) -> None:
    """A hook that reads what another branch wrote is not ordered; along the graph all is."""
    told = () if joined else ("in backward of MulBackward0", "read on stream 1")
    with watched(*told) as checker:
        accelerator = checker.accelerator
        compute, other = accelerator.current_stream(), accelerator.Stream()
        a, b = (torch.ones(4, requires_grad=True) for _ in range(2))
        with torch.no_grad():
            seen = torch.zeros(4)
        other.wait_stream(compute)
        with accelerator.stream(other):
            y = a * 2  # older, so backward comes to it last
        z = b * 3
        compute.wait_stream(other)
        z.register_hook(lambda grad: seen.add_(grad))

        def read(grad: Tensor) -> None:
            if joined:
                accelerator.current_stream().wait_stream(compute)
            assert accelerator.current_stream() is other
            seen.sum()

        y.grad_fn.register_prehook(lambda grads: read(grads[0]))
        (y + z).sum().backward()
        seen.sum()  # the leaves' streams have been waited for


# The engine without one kind of joins.


@pytest.mark.parametrize(
    "waiter,awaited",
    [
        (Lane.GATHER, Lane.COMPUTE),
        (Lane.COMPUTE, Lane.GATHER),
        (Lane.REDUCE, Lane.COMPUTE),
        (Lane.COMPUTE, Lane.REDUCE),
    ],
)
def test_joins_are_missed(waiter: Lane, awaited: Lane) -> None:
    join = StreamLanes.join

    def without(lanes: StreamLanes, *pair: Lane) -> None:
        if pair != (waiter, awaited):
            join(lanes, *pair)

    (program,) = (one for one in PROGRAMS if one.name == "plain_steps")
    with (
        patch.object(StreamLanes, "join", without),
        solo(program.world),
        pytest.raises(RaceError, match=f"makes .* wait for (wire of )?{awaited}"),
    ):
        checked(program.run)


# Programs without races.


@pytest.mark.parametrize("name", [program.name for program in PROGRAMS])
def test_programs_have_no_races(name: str) -> None:
    (program,) = (one for one in PROGRAMS if one.name == name)
    with solo(program.world):
        figures = checked(program.run).figures
    assert figures["lanes"] >= 4 and figures["accesses"] > 1000


def test_offloaded_shards_lie_on_the_host() -> None:
    """Or no program would use the joins of offloading."""
    checker = Checker()
    with checker.attached(), solo(2):
        model = shard(make(), offload_policy=fullshard.CPUOffloadPolicy())
        for param in model.parameters():
            assert checker.booking.block_of(local_part(param)).on_host


class Block(nn.Linear):
    """Tells how far the stream that computes has got when it has computed."""

    def __init__(self, checker: Checker) -> None:
        super().__init__(4, 4)
        self.ends: list[int] = []
        self._compute = checker.accelerator.current

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x).relu()
        self.ends.append(self._compute.clock[self._compute])
        return x


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_gathers_do_not_wait_for_the_unit_before(
    layout: fullshard.PerParameter | fullshard.Ragged,
) -> None:
    """A gather starts early in the first forward, and in the second, when the order is known."""
    checker = Checker()
    compute = checker.accelerator.current
    known: list[int] = []  # of each gather: how far compute must have got before it begins

    def all_gather(wire: TracedWire, *tensors: Any) -> Pending:
        known.append(checker.accelerator.current.clock.get(compute, 0))
        return original(wire, *tensors)

    original = TracedWire.all_gather
    with checker.attached(), solo(2), patch.object(TracedWire, "all_gather", all_gather):
        blocks = [Block(checker) for _ in range(4)]
        model = nn.Sequential(*blocks)
        for block in blocks:
            fullshard.fully_shard(block, layout=layout)
        fullshard.fully_shard(model, layout=layout)
        for number in range(2):
            known.clear()
            model(torch.ones(2, 4))
            assert len(known) == len(blocks)
            for block, gather_knows in zip(blocks[:-1], known[1:], strict=True):
                assert gather_knows < block.ends[number]
    checker.check()


def test_nothing_is_wrapped_afterwards() -> None:
    with solo(2):
        mesh = dist.init_device_mesh("cpu", (2,))
        assert isinstance(comm.collectives_of(mesh), comm.DryWire)
