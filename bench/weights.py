"""The memory that weights of Hugging Face need beside the shards, when read and when written."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import fullshard
from bench.compare import on_ranks, verdict
from bench.machine import table
from bench.models import GPT, Shape

WORLDS = (2, 4)
SHAPE = Shape(vocab=8192, dim=1024, layers=8, heads=16, length=64, batch=1)
SMALL = Shape(vocab=64, dim=64, layers=1, heads=4, length=64, batch=1)
BUFFER_NBYTES = 32 << 20  # what docs/checkpoints.md says of both
BOUND = 2.0  # buffers


def held() -> int:
    """Bytes that this process has in memory; pages of files, which cost nobody memory, left out."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(
        int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon", "RssShmem"))
    )


def peak_of(call: Callable[[], Any]) -> int:
    """Bytes by which this process grew at most while ``call`` ran, looked at each millisecond."""
    found = [held()]
    has_ended = threading.Event()

    def look() -> None:
        while not has_ended.wait(0.001):
            found.append(held())

    dist.barrier()
    thread = threading.Thread(target=look)
    thread.start()
    call()
    has_ended.set()
    thread.join()
    return max(found) - found[0]


def made(shape: Shape) -> Any:
    """A model without memory, sharded by its blocks."""
    with torch.device("meta"):
        model = GPT(shape)
    fullshard.shard_blocks(model)
    return model


def work(root: Path) -> dict[str, int]:
    """Return the peaks of this rank beside its shards, and the bytes of the shards."""
    world = dist.get_world_size()
    # Once for modules that are imported late and for memory that the wire keeps.
    warm = made(SMALL)
    fullshard.checkpoint.load_weights(warm, root / "small")
    fullshard.checkpoint.save_weights(warm, root / f"small-{world}")
    model = made(SHAPE)
    load = peak_of(lambda: fullshard.checkpoint.load_weights(model, root / "large"))
    own = sum(param.to_local().nbytes for param in model.parameters())
    save = peak_of(lambda: fullshard.checkpoint.save_weights(model, root / f"large-{world}"))
    return {"load": load - own, "save": save, "shards": own}


def figures() -> dict[str, dict[str, float]]:
    """By world, the most that a rank needed beside its shards, in buffers; its shards, too."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, shape in (("small", SMALL), ("large", SHAPE)):
            (root / name).mkdir()
            torch.manual_seed(0)
            save_file(GPT(shape).state_dict(), root / name / "model.safetensors")
        for world in WORLDS:
            all_found = on_ranks(work, world, root)
            most = {key: max(one[key] for one in all_found) for key in all_found[0]}
            found[f"{world} ranks"] = {key: n / BUFFER_NBYTES for key, n in most.items()}
    return found


def report(found: dict[str, dict[str, float]]) -> int:
    """Print the table; how many bounds were missed."""
    print(f"memory of a rank beside its shards, in buffers of {BUFFER_NBYTES >> 20} MiB\n")
    rows = [[name, *(f"{one[key]:.2f}" for key in one)] for name, one in found.items()]
    print(table(["", "load_weights", "save_weights", "the shards"], rows))
    missed = [
        f"{key}, {name}"
        for name, one in found.items()
        for key in ("load", "save")
        if one[key] > BOUND
    ]
    return verdict(missed)
