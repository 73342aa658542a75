"""Training on hosts that share only a network: network namespaces that the test creates."""

from __future__ import annotations

import copy
import json
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.hosts import NoHosts, enter, hosts, sent_nbytes
from fullshard.checkpoint import Checkpointer
from fullshard.comm.c10d import Transport, TransportRequest, way_of
from fullshard.comm.twolevel import TwoLevels
from tests.ranks.net import apart, batch, make, shard

WORLD, PER_HOST = 4, 2
TIMEOUT_S = 120.0


def train(process: int, names: Sequence[str], folder: str) -> None:
    """Train a step; write its difference to the unsharded model's, the hosts and the bytes sent.

    Afterwards delete one host's copy of a checkpoint in memory, and load the checkpoint.
    """
    enter(names[process // PER_HOST])
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=process, world_size=WORLD)
    plain = make()
    model = shard(copy.deepcopy(plain))
    dist.barrier()
    before = sent_nbytes()
    model(batch(process)).square().mean().backward()
    plain(torch.cat([batch(rank) for rank in range(WORLD)])).square().mean().backward()
    for one in (plain, model):
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    dist.barrier()
    sent = sent_nbytes() - before
    assert dist.group.WORLD is not None
    way = way_of(dist.group.WORLD, TransportRequest(Transport.SHARED))
    assert isinstance(way, TwoLevels)
    memory = Path(folder, f"memory-{process // PER_HOST}")
    checkpointer = Checkpointer(memory, copies=2)
    checkpointer.save(model, step=1)
    if process == WORLD - 1:
        shutil.rmtree(memory)
    dist.barrier()
    again = shard(make())
    with torch.no_grad():
        for param in again.parameters():
            param.zero_()
    loaded = checkpointer.load(again)
    said = {
        "apart": max(apart(model, plain), apart(again, plain)),
        "hosts": way.hosts,
        "sent": sent,
        "step": loaded.step if loaded else 0,
    }
    Path(folder, f"{process}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


def test_a_step_on_two_hosts_of_two_ranks(tmp_path: Path) -> None:
    with ExitStack() as ending:
        try:
            names = ending.enter_context(hosts(WORLD // PER_HOST))
        except NoHosts as why:
            pytest.skip(f"NOT TESTED: {why}")
        context = mp.start_processes(train, (names, str(tmp_path)), nprocs=WORLD, join=False)
        assert context is not None
        for process in context.processes:
            ending.callback(process.kill)
        deadline = time.monotonic() + TIMEOUT_S
        while not context.join(1.0):  # raises the exception of a rank
            assert time.monotonic() < deadline, "the ranks hang"
    for rank in range(WORLD):
        said = json.loads((tmp_path / f"{rank}.json").read_text())
        assert said["apart"] <= 1e-12
        assert said["hosts"] == [[0, 1], [2, 3]]
        assert said["sent"] > 0
        assert said["step"] == 1
