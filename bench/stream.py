"""Streaming whole weights out of a sharded model: time and memory, against what programs do today.

One by one: ``full_tensor()`` of each parameter, as most do. Gathered: the whole state dict on the
first rank, by PyTorch. Each contender does the same with every tensor on the first rank: it is
copied into memory that an engine would have.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import fullshard
from bench.checkpoint import free_address
from bench.machine import idle, table
from bench.models import GPT, Shape
from bench.weights import peak_of

__all__ = ["figures", "report"]

WORLDS = (2, 4)
ROUNDS = 7
SHAPE = Shape(vocab=8192, dim=1024, layers=8, heads=16, length=64, batch=1)
BUCKET_NBYTES = 32 << 20
LAYOUTS = {"ragged": fullshard.Ragged(), "per-parameter": fullshard.PerParameter()}
ONE_BY_ONE, GATHERED = "full_tensor() one by one", "gathered on the first rank"
TIME, PEAK = 0.5, 2.0  # of one by one; buckets
SLACK = 0.05  # buckets, for what Python and the allocator keep


def worker(rank: int, world: int, store: str, results: str) -> None:
    """One rank; rank 0 writes seconds and peaks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store, rank=rank, world_size=world)
    plain = GPT(SHAPE).to(torch.float32)
    engine = {name: torch.empty_like(value) for name, value in plain.state_dict().items()}
    calls: dict[str, Callable[[], None]] = {}

    def take(name: str, value: Tensor) -> None:
        if rank == 0:
            engine[name].copy_(value)

    theirs: Any = GPT(SHAPE)
    for block in theirs.blocks:
        fully_shard(block)
    fully_shard(theirs)

    def one_by_one() -> None:
        for name, param in theirs.named_parameters():
            take(name, param.full_tensor())

    def gathered() -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        for name, value in get_model_state_dict(theirs, options=options).items():
            take(name, value)

    calls |= {ONE_BY_ONE: one_by_one, GATHERED: gathered}
    for layout, value in LAYOUTS.items():
        model = GPT(SHAPE)
        fullshard.shard_blocks(model, layout=value)
        for ranks, where in ((None, "all ranks"), ([0], "the first rank")):
            stream = fullshard.stream_params(model, bucket_nbytes=BUCKET_NBYTES, ranks=ranks)

            def streamed(stream: Any = stream) -> None:
                for bucket in stream:
                    for name, tensor in bucket.items():
                        take(name, tensor)

            calls[f"{layout}, to {where}"] = streamed
    found: dict[str, dict[str, Any]] = {name: {"s": []} for name in calls}
    for name, call in calls.items():
        call()  # modules that are imported late, memory that ranks share
        ctypes.CDLL(None).malloc_trim(0)  # what the last one freed is not to be had for nothing
        found[name]["peak"] = peak_of(call)
    for number in range(ROUNDS):
        names = list(calls)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            calls[name]()
            dist.barrier()
            found[name]["s"].append(time.perf_counter() - start)
    for one in found.values():
        one["s"] = statistics.median(one["s"])
    (Path(results) / f"{world}-{rank}").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def figures() -> dict[str, dict[str, dict[str, float]]]:
    """By world and contender: seconds, and the most that a rank needed, in buckets.

    Raises:
        Loaded: the machine was not idle.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder, idle():
        for world in WORLDS:
            mp.spawn(worker, (world, free_address(), folder), nprocs=world)
            ranks = [json.loads((Path(folder) / f"{world}-{r}").read_text()) for r in range(world)]
            found[f"{world} ranks"] = {
                name: {
                    "s": ranks[0][name]["s"],
                    "buckets": max(one[name]["peak"] for one in ranks) / BUCKET_NBYTES,
                }
                for name in ranks[0]
            }
    return found


def report(found: dict[str, dict[str, dict[str, float]]]) -> int:
    """Print the tables; how many bounds were missed."""
    missed = []
    print(f"weights of {SHAPE.layers} layers, buckets of {BUCKET_NBYTES >> 20} MiB")
    for world, contenders in found.items():
        base = contenders[ONE_BY_ONE]["s"]
        rows = []
        for name, one in contenders.items():
            rows.append(
                [name, f"{one['s']:.3f}", f"{one['s'] / base:.2f}", f"{one['buckets']:.2f}"]
            )
            if name not in (ONE_BY_ONE, GATHERED):
                missed += [f"time, {name}, {world}"] if one["s"] > TIME * base else []
                missed += [f"peak, {name}, {world}"] if one["buckets"] > PEAK + SLACK else []
        print(f"\n{world}\n")
        print(table(["", "s", "of one by one", "peak, in buckets"], rows))
    print(f"\nbounds missed: {', '.join(missed) or 'none'}")
    return len(missed)
