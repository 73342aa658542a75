"""Ranks that run different units of equal size get an error, on every wire."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from fullshard import FullyShardedDataParallel, MixedPrecisionPolicy, Ragged, fully_shard
from fullshard._torch import collectives as _collectives
from fullshard._torch import world as _world
from fullshard.comm import C10d, Collectives, labels, wrapped
from fullshard.comm.c10d import Transport
from fullshard.comm.ledger import ledger_of
from fullshard.comm.protocol import Label
from fullshard.errors import ProtocolError
from tests.ranks.models import noise, refusal
from tests.ranks.pool import RankPool, on_ranks

every_transport = pytest.mark.parametrize("transport", [Transport.NATIVE, Transport.SHARED])


class Net(nn.Module):
    """Two layers of equal size, run in either order."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.other = nn.Linear(6, 6)
        self.swapped = False

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.other, self.one) if self.swapped else (self.one, self.other)
        return second(first(x))


def by(transport: Transport) -> Callable[[Collectives], Collectives]:
    def wire(inner: Collectives) -> Collectives:
        return inner if inner.group is None else C10d(inner.group, "cpu", transport)

    return wire


def make(face: str, transport: Transport, mesh: DeviceMesh | None = None) -> tuple[nn.Module, Net]:
    """Return the model to call, and the module in it that sets the order."""
    net = Net()
    with wrapped(by(transport)):
        if face == "flat":
            net.one = FullyShardedDataParallel(net.one)
            net.other = FullyShardedDataParallel(net.other)
            return FullyShardedDataParallel(net), net
        for layer in (net.one, net.other):
            fully_shard(layer, mesh=mesh)
        return fully_shard(net, mesh=mesh), net


def step(model: nn.Module) -> None:
    model(noise(2, 6, seed=1, dtype=torch.float32)).sum().backward()


@on_ranks(3)
@every_transport
@pytest.mark.parametrize("face", ["fully_shard", "flat"])
def test_units_in_another_order_are_an_error_on_every_rank(face: str, transport: Transport) -> None:
    model, net = make(face, transport)
    net.swapped = dist.get_rank() == 1
    here, there = ("other", "one") if net.swapped else ("one", "other")
    message = refusal(ProtocolError, step, model)
    assert re.search(rf"\b{here} on rank", message) and "rank 1" in message, message
    assert re.search(rf"\b{there} on rank", message), message


@on_ranks(2)
def test_shared_memory_notices_another_order_in_any_step() -> None:
    model, net = make("fully_shard", Transport.SHARED)
    step(model)
    net.swapped = dist.get_rank() == 1
    with pytest.raises(ProtocolError, match="ranks run different collectives"):
        step(model)


@on_ranks(4)
def test_copies_that_reduce_in_another_order_are_told() -> None:
    """Replicas that run units in another order are reported.

    The ranks of a replica agree; only the ranks that hold the same shard differ.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    model, net = make("fully_shard", Transport.SHARED, mesh)
    net.swapped = mesh.get_local_rank("copies") == 1
    with pytest.raises(ProtocolError, match=r"the mean of unit (one|other) on rank"):
        step(model)


@on_ranks(2)
@every_transport
@pytest.mark.parametrize("what", ["name", "shape", "dtype", "layout", "granularity", "dim"])
def test_other_units_of_equal_size_are_an_error(what: str, transport: Transport) -> None:
    odd = dist.get_rank() == 1
    model = nn.Sequential(nn.Linear(4, 6, bias=False))
    policy = MixedPrecisionPolicy()
    if what == "name" and odd:
        model = nn.Sequential()
        model.add_module("1", nn.Linear(4, 6, bias=False))
    elif what == "shape" and odd:
        model = nn.Sequential(nn.Linear(6, 4, bias=False))
    elif what == "dtype":
        policy = MixedPrecisionPolicy(param_dtype=torch.float16 if odd else torch.bfloat16)
    options: dict[str, Any] = {}
    if what == "layout" and odd:
        options["layout"] = Ragged()
    elif what == "granularity":
        options["layout"] = Ragged(8 if odd else "row")
    elif what == "dim" and odd:
        options["shard_placement_fn"] = lambda _: Shard(1)
    with wrapped(by(transport)):
        fully_shard(model, mp_policy=policy, **options)
    x = torch.ones(2, 6 if what == "shape" and odd else 4)
    with pytest.raises(ProtocolError, match=r"unit \(root\) \((0|1).weight"):
        model(x)


@on_ranks(2)
@every_transport
def test_names_may_change_and_groups_be_shared(transport: Transport) -> None:
    """Names may change, and units and groups may be shared, if all ranks agree."""
    with wrapped(by(transport)):
        block = fully_shard(nn.Linear(6, 6))
        step(block)  # a root at this time
        pair = fully_shard(nn.Sequential(block, fully_shard(nn.Linear(6, 6))))
        step(pair)
        twin = copy.deepcopy(pair)
        step(twin)
        step(pair)
        whole = fully_shard(nn.Sequential(pair, nn.Linear(6, 6)))
        step(whole)
        step(block)
        step(twin)
        tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        tied[1].weight = tied[0].weight
        step(fully_shard(tied))
        step(fully_shard(nn.Sequential(fully_shard(nn.Linear(6, 6)), nn.Linear(6, 6))))


@on_ranks(2)
@pytest.mark.parametrize("transport", [Transport.NATIVE])
def test_a_label_is_compared_once(transport: Transport) -> None:
    calls = []
    gather = _collectives.all_gather

    def counted(
        group: dist.ProcessGroup, outputs: list[Tensor], sources: list[Tensor], **more: bool
    ) -> dist.Work | None:
        calls.append(outputs[0].dtype is torch.uint8)
        return gather(group, outputs, sources, **more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(labels._collectives, "all_gather", counted)
        model, _ = make("fully_shard", transport)
        counts = []
        for _ in range(3):
            step(model)
            counts.append(sum(calls))
            calls.clear()
    assert counts == [2, 0, 0]


@on_ranks(1, process_group=False)
def test_a_stand_in_for_a_group_is_asked_nothing() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    step(fully_shard(nn.Linear(6, 6)))
    dist.destroy_process_group()


def seen_to_compare() -> str:
    """Return the kind of wait that rank 0 reports while it compares labels."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    wire = C10d(group, "cpu", Transport.NATIVE).labelled(Label("unit a"))
    ledger, store = ledger_of(group), _world.default_store()
    out, own = torch.zeros(2), torch.ones(1)
    if group.rank() == 1:
        store.wait(["seen to compare"])
        wire.all_gather([out], [own]).wait()
        return ""
    with ThreadPoolExecutor(1) as beside:
        gathering = beside.submit(lambda: wire.all_gather([out], [own]).wait())
        while (wait := ledger.wait()) is None:
            time.sleep(0.001)
        store.set("seen to compare", "")
        gathering.result()
    return wait.entry[1]


def test_who_compares_labels_is_seen_to_wait(pool: RankPool) -> None:
    assert pool.run(2, seen_to_compare) == ["comparison", ""]
