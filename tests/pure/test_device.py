"""Streams and storage, tested with fake streams and events that record calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fullshard.comm import Done, Label, Pending, SingleRank
from fullshard.comm.native import Native
from fullshard.device import Buffer, BufferKind, Lane, Lanes, StorageMeter, make_lanes
from fullshard.device.streams import StreamLanes
from fullshard.engine import Bucket, BucketSpec
from fullshard.engine import spec as bucket_spec
from fullshard.layout import ParamSpec, PerParameter, Ragged
from fullshard.tensors import Face, Shown


class FakeStream:
    def __init__(self, name: str, notes: list[str]) -> None:
        self.name = name
        self._notes = notes

    def wait_event(self, event: Any) -> None:
        self._notes.append(f"{self.name} waits {event.number}")

    def wait_stream(self, other: FakeStream) -> None:
        self._notes.append(f"{self.name} waits for {other.name}")


class FakeAccelerator:
    """A stand-in for ``torch.cuda`` that records the order of events, waits and work."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.priorities: list[int] = []
        self._numbers = count()
        self._made: dict[str, FakeStream] = {}
        # The order in which the lanes create their streams.
        self._names = iter(["gather", "reduce", "gather wire", "reduce wire", "host to device"])
        self.current = "compute"
        self.done = -1  # number of the last event that the device has passed

    def Stream(self, *, device: torch.device, priority: int) -> Any:
        self.priorities.append(priority)
        return self._stream(next(self._names))

    def _stream(self, name: str) -> FakeStream:
        if name not in self._made:
            self._made[name] = FakeStream(name, self.notes)
        return self._made[name]

    def Event(self, enable_timing: bool = False) -> Any:
        event = SimpleNamespace(number=next(self._numbers))
        event.synchronize = lambda: self.notes.append(f"host waits {event.number}")
        event.query = lambda: event.number <= self.done
        if enable_timing:
            event.elapsed_time = lambda later: 1000.0 * (later.number - event.number)  # ms
        event.record = lambda stream: self.notes.append(f"{stream.name} records {event.number}")
        return event

    def current_stream(self, device: torch.device) -> Any:
        return self._stream(self.current)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before


class Group:
    """A stand-in for a process group."""


class FakeWire:
    """A world of two with equal shards; records the stream of each collective."""

    rank = 0
    adds_wide = False

    def __init__(self, accelerator: FakeAccelerator, world: int = 2) -> None:
        self._accelerator = accelerator
        self.world = world
        self.group: Any = Group()

    def labelled(self, label: Label) -> FakeWire:
        return self

    def all_gather(self, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Pending:
        self._accelerator.notes.append(f"all_gather on {self._accelerator.current}")
        for output, source in zip(outputs, sources, strict=True):
            output.copy_(source.repeat(self.world))
        return Done()

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        self._accelerator.notes.append(f"reduce_scatter on {self._accelerator.current}")
        output.copy_(source.view(self.world, -1)[0])
        return Done()


@pytest.fixture
def cuda() -> FakeAccelerator:
    return FakeAccelerator()


def lanes_of(cuda: FakeAccelerator) -> Lanes:
    return StreamLanes(cuda, torch.device("cpu"))  # type: ignore[arg-type]


def bucket_on(cuda: FakeAccelerator, layout: Any, **more: Any) -> Bucket:
    params = [torch.nn.Parameter(torch.arange(8.0).view(4, 2)), torch.nn.Parameter(torch.ones(6))]
    specs = [ParamSpec("w", (4, 2)), ParamSpec("b", (6,))]
    nowhere: Any = [None, None]  # these tests need no mesh and no placements
    shapes = [torch.Size(one.shape) for one in specs]
    form = Face(shapes, nowhere, shown=Shown.ORIGINALS)
    spec = BucketSpec(layout.build(specs, 2, 4), FakeWire(cuda), form, torch.device("cpu"), **more)
    return Bucket(spec, params)


def beside(collective: str, lane: str, number: int) -> list[str]:
    """Return the notes of a collective on the wire stream that follows the lane's work."""
    return [
        f"{lane} records {number}", f"{lane} wire waits {number}",
        f"{collective} on {lane} wire", f"{lane} wire records {number + 1}",
    ]  # fmt: skip


def test_join_records_on_the_awaited_and_waits_on_the_waiter(cuda: FakeAccelerator) -> None:
    lanes = lanes_of(cuda)
    lanes.join(Lane.COMPUTE, Lane.GATHER)
    lanes.join(Lane.REDUCE, Lane.COMPUTE)
    assert cuda.notes == [
        "gather records 0", "compute waits 0", "compute records 1", "reduce waits 1",
    ]  # fmt: skip


def test_compute_is_all_streams_that_were_seen_since_it_rested(cuda: FakeAccelerator) -> None:
    lanes = lanes_of(cuda)
    lanes.join(Lane.COMPUTE, Lane.COMPUTE)
    assert cuda.notes == []
    with cuda.stream(cuda._stream("branch")):
        lanes.track_stream()
    with lanes.on(Lane.REDUCE):
        lanes.track_stream()  # the lanes' own streams are not tracked
    lanes.join(Lane.GATHER, Lane.COMPUTE)
    assert cuda.notes == [
        "compute records 0", "branch records 1", "gather waits 0", "gather waits 1",
    ]  # fmt: skip
    cuda.notes.clear()
    lanes.join(Lane.COMPUTE, Lane.COMPUTE)
    assert sorted(cuda.notes[-4:]) == [
        "branch waits 2", "branch waits 3", "compute waits 2", "compute waits 3",
    ]  # fmt: skip
    lanes.untrack_streams()
    cuda.notes.clear()
    lanes.join(Lane.COMPUTE, Lane.REDUCE)
    assert cuda.notes == ["reduce records 4", "compute waits 4"]


def test_waits_of_compute_are_timed_from_the_first_question_on(cuda: FakeAccelerator) -> None:
    lanes = lanes_of(cuda)
    lanes.join(Lane.COMPUTE, Lane.GATHER)
    assert lanes.waited_s() == 0
    lanes.join(Lane.REDUCE, Lane.COMPUTE)
    cuda.notes.clear()
    lanes.join(Lane.COMPUTE, Lane.GATHER)
    assert cuda.notes == [
        "gather records 2", "compute records 3", "compute waits 2", "compute records 4",
    ]  # fmt: skip
    assert lanes.waited_s() == 0
    cuda.done = 4
    assert (lanes.waited_s(), lanes.waited_s()) == (1.0, 1.0)
    assert not any(note.startswith("host waits") for note in cuda.notes)


def test_waits_in_a_captured_graph_are_not_timed(cuda: FakeAccelerator) -> None:
    """An event that was recorded in a capture cannot be queried."""
    lanes = lanes_of(cuda)
    assert lanes.waited_s() == 0
    cuda.is_current_stream_capturing = lambda: True  # type: ignore[attr-defined]
    lanes.join(Lane.COMPUTE, Lane.GATHER)
    assert cuda.notes == ["gather records 0", "compute waits 0"]


def test_counting_waits_keeps_no_more_events_than_the_device_is_behind(
    cuda: FakeAccelerator,
) -> None:
    lanes = lanes_of(cuda)
    assert lanes.waited_s() == 0
    for _ in range(100):
        lanes.join(Lane.COMPUTE, Lane.GATHER)
        cuda.done = next(cuda._numbers) - 7  # three joins take at least seven numbers
    assert len(lanes._waits) <= 3  # type: ignore[attr-defined]
    cuda.done = next(cuda._numbers)
    assert lanes.waited_s() == 100


def test_stamps_are_read_once_the_device_is_there(cuda: FakeAccelerator) -> None:
    lanes = lanes_of(cuda)
    early, late = lanes.stamp(Lane.GATHER), lanes.stamp(Lane.COMPUTE)
    assert cuda.notes == ["gather records 0", "compute records 1"]
    assert late.seconds_since(early) is None
    cuda.done = 0
    assert late.seconds_since(early) is None
    cuda.done = 1
    assert late.seconds_since(early) == 1.0
    assert not any(note.startswith("host waits") for note in cuda.notes)


def test_stamps_of_a_cpu_are_the_time() -> None:
    lanes = make_lanes(torch.device("cpu"))
    early = lanes.stamp(Lane.GATHER)
    took_s = lanes.stamp(Lane.COMPUTE).seconds_since(early)
    assert took_s is not None and 0 <= took_s < 10


def test_streams_and_events_of_the_user_are_waited_for(cuda: FakeAccelerator) -> None:
    lanes, theirs = lanes_of(cuda), cuda._stream("theirs")
    with lanes.on(Lane.REDUCE), lanes.on_user_stream(theirs):
        cuda.notes.append(f"hook on {cuda.current}")
    lanes.wait_event(Lane.GATHER, cuda.Event())
    assert cuda.notes == [
        "theirs waits for reduce", "hook on theirs", "reduce waits for theirs", "gather waits 0",
    ]  # fmt: skip


def test_a_stream_of_the_user_is_waited_for_after_an_exception(cuda: FakeAccelerator) -> None:
    lanes, theirs = lanes_of(cuda), cuda._stream("theirs")
    with pytest.raises(ValueError), lanes.on(Lane.REDUCE), lanes.on_user_stream(theirs):
        raise ValueError
    assert cuda.notes == ["theirs waits for reduce", "reduce waits for theirs"]


@pytest.mark.parametrize("layout", [PerParameter(), Ragged()])
def test_unsharding_gathers_beside_compute_and_frees_after_it(
    cuda: FakeAccelerator, layout: Any
) -> None:
    whole = bucket_on(cuda, layout).materialize(lanes_of(cuda), StorageMeter())
    cuda.notes.clear()
    whole.start()
    assert cuda.notes == beside("all_gather", "gather", 0)
    cuda.notes.clear()
    whole.finish()
    assert cuda.notes == ["gather waits 1", "gather records 2", "compute waits 2"]
    cuda.notes.clear()
    whole.free()
    assert cuda.notes == ["compute records 3", "gather waits 3"]


@pytest.mark.parametrize("layout", [PerParameter(), Ragged()])
def test_reducing_waits_for_compute_and_compute_for_it(cuda: FakeAccelerator, layout: Any) -> None:
    bucket = bucket_on(cuda, layout)
    whole = bucket.materialize(lanes_of(cuda), StorageMeter())
    whole.start()
    whole.finish()
    assert bucket.gradients is not None
    for param in whole.params:
        param.requires_grad_(True)
        param.grad = torch.ones_like(param)
    cuda.notes.clear()
    bucket.gradients.start()
    assert cuda.notes == [
        "compute records 3", "reduce waits 3", *beside("reduce_scatter", "reduce", 4),
    ]  # fmt: skip
    cuda.notes.clear()
    bucket.gradients.finish()
    assert cuda.notes == ["reduce waits 5", "reduce records 6", "compute waits 6"]
    assert all(param.grad is not None for param in bucket.sharded_params)


def awaited_by_compute(notes: list[str]) -> set[str]:
    """Return the collectives that the compute stream waited for, directly or not."""
    done: dict[str, set[str]] = {}  # by stream
    at: dict[str, set[str]] = {}  # by event
    numbered: Counter[str] = Counter()
    for note in notes:
        if " records " in note:
            stream, event = note.split(" records ")
            at[event] = set(done.get(stream, ()))
        elif " waits " in note:
            stream, event = note.split(" waits ")
            done.setdefault(stream, set()).update(at[event])
        else:
            collective, stream = note.split(" on ")
            done.setdefault(stream, set()).add(f"{collective} {numbered[collective]}")
            numbered[collective] += 1
    return done.get("compute", set())


def test_who_waits_for_one_collective_does_not_wait_for_the_next(cuda: FakeAccelerator) -> None:
    """If collectives ran on the lane's stream, it would."""
    lanes = lanes_of(cuda)
    group = Group()
    buckets = [bucket_on(cuda, PerParameter()) for _ in range(2)]
    for bucket in buckets:
        bucket.spec.comm.group = group  # type: ignore[misc]
    wholes = [bucket.materialize(lanes, StorageMeter()) for bucket in buckets]
    cuda.notes.clear()
    for whole in wholes:
        whole.start()
    wholes[0].finish()
    assert awaited_by_compute(cuda.notes) == {"all_gather 0"}
    wholes[1].finish()
    assert awaited_by_compute(cuda.notes) == {"all_gather 0", "all_gather 1"}

    cuda.notes.clear()
    for bucket, whole in zip(buckets, wholes, strict=True):
        for param in whole.params:
            param.requires_grad_(True)
            param.grad = torch.ones_like(param)
        assert bucket.gradients is not None
        bucket.gradients.start()
    assert buckets[0].gradients is not None and buckets[1].gradients is not None
    buckets[0].gradients.finish()
    assert awaited_by_compute(cuda.notes) == {"reduce_scatter 0"}
    buckets[1].gradients.finish()
    assert awaited_by_compute(cuda.notes) == {"reduce_scatter 0", "reduce_scatter 1"}


def test_who_waits_for_a_unit_from_the_host_does_not_wait_for_the_next(
    cuda: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        bucket_spec.Outbound,
        "send",
        lambda self, shard: cuda.notes.append(f"copy on {cuda.current}"),
    )
    lanes, group = lanes_of(cuda), Group()
    more = {"offload": bucket_spec.Offload(pinned=True)}
    buckets = [bucket_on(cuda, PerParameter(), **more) for _ in range(2)]
    for bucket in buckets:
        bucket.spec.comm.group = group  # type: ignore[misc]
    wholes = [bucket.materialize(lanes, StorageMeter()) for bucket in buckets]
    cuda.notes.clear()
    for whole in wholes:  # as with a prefetch budget of several units
        whole.start()
    wholes[0].finish()
    assert awaited_by_compute(cuda.notes) == {"copy 0", "all_gather 0"}


def test_collectives_that_overlap_compute_have_a_high_priority(cuda: FakeAccelerator) -> None:
    lanes = lanes_of(cuda)
    lanes.wire(Lane.GATHER, FakeWire(cuda))  # type: ignore[arg-type]
    assert cuda.priorities == [-1, -1, -1]


def test_a_group_has_one_stream_on_a_lane_and_one_of_one_rank_has_none(
    cuda: FakeAccelerator,
) -> None:
    lanes, wire = lanes_of(cuda), FakeWire(cuda)
    ours: Any = [lanes.wire(Lane.GATHER, wire) for _ in range(2)]  # type: ignore[arg-type]
    assert ours[0].stream is ours[1].stream
    alone = SingleRank()
    assert lanes.wire(Lane.GATHER, alone) is alone


def asked(averages: bool, device_type: str) -> list[bool]:
    """Return the ``asyncOp`` flag of each collective on a backend for ``device_type``."""
    seen: list[bool] = []

    def note(*given: Any) -> None:
        seen.append(given[-1].asyncOp)

    group: Any = SimpleNamespace(
        _device_types=[torch.device(device_type)],
        _allgather_base=note,
        allgather_into_tensor_coalesced=note,
        _reduce_scatter_base=note,
        allreduce=note,
        size=lambda: 2,
    )
    native = Native(device_type, averages=averages)
    one, two = torch.ones(1), torch.ones(2)
    started = [
        native.all_gather(group, [two], [one], ""),
        native.all_gather(group, [two, two], [one, one], ""),
        native.reduce_scatter_mean(group, one, two, ""),
        native.all_reduce_mean(group, one, ""),
    ]
    for pending in started:
        pending.wait()  # works although the backend returned None
    return seen


@pytest.mark.parametrize("averages", [False, True])
def test_backends_with_streams_take_the_one_that_is_current(averages: bool) -> None:
    """On its own stream of default priority, NCCL would queue behind compute kernels."""
    assert asked(averages, "cuda") == [False] * 4
    assert asked(averages, "cpu") == [True] * 4


@pytest.mark.parametrize("layout", [PerParameter(), Ragged()])
def test_the_host_waits_for_a_copy_only_before_it_writes_its_memory_again(
    cuda: FakeAccelerator, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinning would need an accelerator, but the order of events does not depend on pinning."""
    plain = bucket_spec.host_tensor
    monkeypatch.setattr(
        bucket_spec, "host_tensor", lambda numel, dtype, pinned: plain(numel, dtype, pinned=False)
    )
    bucket = bucket_on(cuda, layout, offload=bucket_spec.Offload(pinned=True))
    whole = bucket.materialize(lanes_of(cuda), StorageMeter())
    cuda.notes.clear()
    whole.start()
    assert cuda.notes == [
        "gather records 0",
        "host to device waits 0", "host to device records 1", "host to device records 2",
        *beside("all_gather", "gather", 2)[1:],
    ]  # fmt: skip
    whole.finish()
    whole.free()
    bucket.shard.mul_(2)  # the copy to the device may still run; it reads a separate buffer
    cuda.notes.clear()
    whole.start()
    assert cuda.notes == [
        "gather records 6", "host to device waits 6", "host waits 1",
        "host to device records 7", "host to device records 8",
        *beside("all_gather", "gather", 8)[1:],
    ]  # fmt: skip
    whole.finish()
    expected = torch.arange(8.0).view(4, 2)[:2].repeat(2, 1) * 2  # both ranks hold the same shard
    if isinstance(layout, PerParameter):
        assert torch.equal(whole.params[0], expected)

    assert bucket.gradients is not None
    for param in whole.params:
        param.requires_grad_(True)
        param.grad = torch.ones_like(param)
    bucket.gradients.start()
    cuda.notes.clear()
    bucket.gradients.finish()
    assert cuda.notes == [
        "reduce waits 13", "reduce records 14", "host waits 14",
        "reduce records 15", "compute waits 15",
    ]  # fmt: skip
    assert all(param.grad is not None for param in bucket.sharded_params)


def test_a_buffer_counts_what_it_holds() -> None:
    meter = StorageMeter()
    buffer = Buffer(10, torch.float64, torch.device("cpu"), kind=BufferKind.UNSHARDED, meter=meter)
    view = buffer.tensor[2:4]
    for _ in range(2):
        buffer.allocate()
        assert meter.held_nbytes[BufferKind.UNSHARDED] == 80
        view.fill_(3)
        assert buffer.tensor[3] == 3
        buffer.free()
        buffer.free()
        assert meter.held_nbytes[BufferKind.UNSHARDED] == 0
        assert buffer.tensor.untyped_storage().nbytes() == 0
    assert meter.peak_nbytes[BufferKind.UNSHARDED] == 80


def test_memory_made_in_inference_mode_can_be_trained_on_later() -> None:
    with torch.inference_mode():
        buffer = Buffer(
            4, torch.float32, torch.device("cpu"), kind=BufferKind.UNSHARDED, meter=StorageMeter()
        )
    assert not buffer.tensor.is_inference()
