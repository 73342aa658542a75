"""Ranks may be threads of one process, as in PyTorch's own tests."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks.models import full_parameters, noise
from tests.ranks.net import make, optimizer_of, shard
from tests.ranks.pool import RankPool, on_ranks

WORLD = 4


def rows(number: int) -> torch.Tensor:
    return noise(WORLD, 2, 6, seed=number)


def train(model: Any, pieces: Any) -> Any:
    """Train three steps of two microbatches; ranks may step during another rank's backward."""
    optimizer = optimizer_of(model)
    for number in range(3):
        for last in (False, True):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(last)
            model(pieces(2 * number + last)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


def on_threads() -> list[float]:
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    expected = train(make(), lambda number: rows(number).flatten(0, 1))
    apart: list[float] = []
    errors: list[Exception] = []

    def rank_of(rank: int, store: Any) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=WORLD, store=store)
            for shape in ((WORLD,), (2, 2)):
                names = ("copies", "shards")[-len(shape) :]
                mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
                for reshard in (None, False):
                    model = shard(make(), mesh=mesh, reshard_after_forward=reshard)
                    found = train(model, lambda number: rows(number)[rank])
                    apart.extend((found[n] - expected[n]).abs().max().item() for n in expected)
        except Exception as error:
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        store = dist.HashStore()
        threads = [threading.Thread(target=rank_of, args=(rank, store)) for rank in range(WORLD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if errors:
        raise errors[0]
    return apart


def test_ranks_may_be_threads(pool: RankPool) -> None:
    (apart,) = pool.run(1, on_threads, process_group=False)
    assert len(apart) == WORLD * 4 * 9 and max(apart) <= 1e-12


@on_ranks(2)
def test_an_optimizer_may_step_in_another_thread() -> None:
    """The optimizer steps in another thread while units stay unsharded."""
    plain, model = make(), shard(make())
    model.set_reshard_after_backward(False)
    for one in (plain, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for number in range(2):
            one(noise(2, 6, seed=number)).square().mean().backward()
            thread = threading.Thread(target=optimizer.step)
            thread.start()
            thread.join()
            optimizer.zero_grad()
    given = noise(2, 6, seed=9)
    assert (plain(given) - model(given)).abs().max().item() <= 1e-12
