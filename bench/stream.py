"""Streaming whole weights out of a sharded model: time and memory, against what programs do today.

One by one: ``full_tensor()`` of each parameter, as most do. Gathered: the whole state dict on the
first rank, by PyTorch. Each contender does the same with every tensor on the first rank: it is
copied into memory that an engine would have.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import fullshard
from bench.compare import in_turns, medians, on_ranks, seconds_of, verdict
from bench.machine import idle, table
from bench.models import GPT, Shape
from bench.weights import peak_of

WORLDS = (2, 4)
ROUNDS = 7
SHAPE = Shape(vocab=8192, dim=1024, layers=8, heads=16, length=64, batch=1)
BUCKET_NBYTES = 32 << 20
LAYOUTS = {"ragged": fullshard.Ragged(), "per-parameter": fullshard.PerParameter()}
ONE_BY_ONE, GATHERED = "full_tensor() one by one", "gathered on the first rank"
TIME, PEAK = 0.5, 2.0  # of one by one; buckets
SLACK = 0.05  # buckets, for what Python and the allocator keep


def work() -> dict[str, dict[str, float]]:
    """Return the seconds and the peak of each contender on this rank."""
    rank = dist.get_rank()
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
    peaks = {}
    for name, call in calls.items():
        call()  # modules that are imported late, memory that ranks share
        ctypes.CDLL(None).malloc_trim(0)  # what the last one freed is not to be had for nothing
        peaks[name] = peak_of(call)

    def until_all_have(call: Callable[[], None]) -> None:
        call()
        dist.barrier()

    timed = {name: partial(seconds_of, partial(until_all_have, c)) for name, c in calls.items()}
    taken = medians(in_turns(timed, rounds=ROUNDS, rotates=True))
    return {name: {"s": taken[name], "peak": peaks[name]} for name in calls}


def figures() -> dict[str, dict[str, dict[str, float]]]:
    """By world and contender: seconds, and the most that a rank needed, in buckets.

    Raises:
        Loaded: the machine was not idle.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    with idle():
        for world in WORLDS:
            ranks = on_ranks(work, world, has_server=True)
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
    return verdict(missed)
