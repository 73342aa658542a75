"""Shared by benchmarks: ranks, contenders in turns, medians, the list of missed bounds."""

from __future__ import annotations

import os
import pickle
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.machine import Loaded, LoadGuard

_guard = LoadGuard()
"""The load of this rank's machine, looked at between rounds of ``in_turns``."""


def on_ranks(
    work: Callable[..., Any],
    world: int,
    *args: Any,
    has_server: bool = False,
    enter: Callable[[int], None] | None = None,
) -> list[Any]:
    """Run ``work(*args)`` on ``world`` gloo ranks of one thread each; return their results.

    Args:
        has_server: ranks meet at a TCP store; with a file, PyTorch's async saves hang.
        enter: called with the rank before it joins the others.

    Raises:
        Loaded: ``in_turns`` found that the machine was not idle.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = _free_address() if has_server else f"file://{folder}/store"
        mp.spawn(_rank, (world, store, folder, enter, work, args), nprocs=world)
        files = [Path(folder, str(rank)) for rank in range(world)]
        found, drifts = zip(*(pickle.loads(file.read_bytes()) for file in files), strict=True)
    if max(drifts) > LoadGuard.tolerance:
        raise Loaded(max(drifts))
    return list(found)


def _free_address() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{found.getsockname()[1]}"


def _rank(
    rank: int,
    world: int,
    store: str,
    folder: str,
    enter: Callable[[int], None] | None,
    work: Callable[..., Any],
    args: Sequence[Any],
) -> None:
    if enter is not None:
        enter(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store, rank=rank, world_size=world)
    found = work(*args)
    drift = _guard.drift if _guard.seconds else 0.0
    Path(folder, str(rank)).write_bytes(pickle.dumps((found, drift)))
    dist.barrier()
    os._exit(0)  # threads of gloo may abort at the end of an interpreter


def _sample(*, alone: bool) -> None:
    """Measure the load while all ranks wait, so that no rank's step counts as load."""
    dist.barrier()
    if not alone or dist.get_rank() == 0:
        _guard.sample()
    dist.barrier()


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a call in a new process."""
    with mp.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def in_turns(
    contenders: Mapping[Any, Callable[[], Any]],
    *,
    warm_up: int = 0,
    rounds: int,
    samples: int = 0,
    alone: bool = False,
    meets: bool = True,
    rotates: bool = False,
) -> dict[Any, list[Any]]:
    """Call all contenders in each round; return the results of each, by round.

    Slow moments of the machine thus hit all contenders alike.

    Args:
        warm_up: rounds before those that count.
        samples: number of looks at the load, between rounds; one more follows the last round.
        alone: only rank 0 looks at the load, since ranks outnumber cores.
        meets: ranks wait for each other before each contender.
        rotates: each round begins with the next contender.
    """
    found: dict[Any, list[Any]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(-warm_up, rounds):
        if samples and number >= 0 and number % (rounds // samples) == 0:
            _sample(alone=alone)
        first = number % len(names) if rotates else 0
        for name in names[first:] + names[:first]:
            if meets:
                dist.barrier()
            taken = contenders[name]()
            if number >= 0:
                found[name].append(taken)
    if samples:
        _sample(alone=alone)
    return found


def medians(found: Mapping[Any, Sequence[Any]]) -> dict[Any, Any]:
    """Return the median by contender; of named tuples, the median of each field."""
    return {
        name: type(taken[0])(*map(statistics.median, zip(*taken, strict=True)))
        if isinstance(taken[0], tuple)
        else statistics.median(taken)
        for name, taken in found.items()
    }


def seconds_of(
    call: Callable[[], object],
    *,
    clock: Callable[[], float] = time.perf_counter,
    repeats: int = 1,
) -> float:
    """Return the mean seconds of ``repeats`` calls."""
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


def verdict(missed: Sequence[str], what: str = "bounds missed") -> int:
    """Print the missed bounds; return their number."""
    print(f"\n{what}: {'; '.join(missed) or 'none'}")
    return len(missed)
