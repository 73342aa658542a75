"""Kill ranks at random times while they use an object store, and check its checkpoints.

    python -m tests.ranks.object_kills 100

Two ranks load the newest checkpoint, compare the loaded model with that step's values, and save one
step after the other. Both ranks are killed after a random time. Then every complete checkpoint must
be intact, and the newest one must be at least as new as the last save that returned on both ranks.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fullshard import checkpoint, fully_shard
from tests.ranks.object_store import objects, trouble

__all__ = ["run"]

_WORLD = 2
_LONGEST_S = 0.7


class Killed(NamedTuple):
    """The counts of a run."""

    kills: int
    steps: int
    unfinished: int
    """Number of kills that left data files without a manifest."""


def state_of(step: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(step)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))
    if dist.is_initialized():
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(step)
    for param in model.parameters():
        param.grad = torch.ones_like(param) * step
    optimizer.step()
    return model, optimizer


def _is_of(step: int, model: nn.Module) -> bool:
    """Return whether the model has the parameters of this step."""
    own, _ = state_of(step)
    pairs = zip(own.parameters(), model.parameters(), strict=True)
    return all(torch.equal(_local(a), _local(b)) for a, b in pairs)


def _local(param: Any) -> torch.Tensor:
    return param.to_local() if hasattr(param, "to_local") else param.detach()


def rank_main(rank: int, port: int, root: str, acknowledged: Path, mode: str) -> None:
    """Load and save until the process is killed."""
    store = dist.TCPStore("127.0.0.1", port, _WORLD, rank == 0, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_WORLD)
    delays = random.Random(os.getpid())
    checkpointer = checkpoint.Checkpointer(root, keep=2, mode=mode)
    with trouble(lambda *_: time.sleep(delays.random() * 0.01)):  # the delay of a network
        model, optimizer = state_of(0)
        loaded = checkpointer.load(model, optimizer)
        step = loaded.step if loaded is not None else 0
        if loaded is not None and not _is_of(step, model):
            (acknowledged.parent / "wrong").write_text(f"step {step}\n")
        while True:
            step += 1
            model, optimizer = state_of(step)
            checkpointer.save(model, optimizer, step=step)
            checkpointer.wait()
            acknowledged.with_suffix(f".{rank}").write_text(str(step))


def _last(acknowledged: Path) -> int:
    """Return the last step whose save returned on both ranks."""
    files = [acknowledged.with_suffix(f".{rank}") for rank in range(_WORLD)]
    return min(int(one.read_text() or 0) if one.exists() else 0 for one in files)


def run(folder: Path, *, kills: int, seed: int) -> Killed:
    """Kill two ranks ``kills`` times; raise ``AssertionError`` on a lost save or a wrong load."""
    command = [sys.executable, "-m", "tests.ranks.object_kills", "spawn", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
        try:
            assert one.stdin is not None and one.stdout is not None
            return _run(folder, kills, random.Random(seed), one.stdin, one.stdout)
        finally:
            one.stdin.close()


def _run(folder: Path, kills: int, dice: random.Random, ask: Any, told: Any) -> Killed:
    root, acknowledged = folder / "run", folder / "saved.txt"
    unfinished = newest = known = 0
    for number in range(kills):
        mode = ("sync", "async")[number % 2]
        ask.write(f"emulated://{root} {acknowledged} {mode}\n")
        ask.flush()
        pids = [int(one) for one in told.readline().split()]
        began_s = time.monotonic()
        while not told_to_go(acknowledged, known) and time.monotonic() - began_s < 30:
            time.sleep(0.005)  # until both ranks have connected and saved
            if number % 3 == 0:
                break  # kill every third pair of ranks earlier, during the load
        time.sleep(dice.random() * _LONGEST_S)
        for pid in dice.sample(pids, len(pids)):
            os.kill(pid, signal.SIGKILL)
        assert told.readline().strip() == "ended"
        known = max(known, _last(acknowledged))
        assert not (folder / "wrong").exists(), (folder / "wrong").read_text()
        found = checkpoint.list_checkpoints(f"emulated://{root}")
        for info in found:
            checkpoint.verify(info.path)
        newest = found[-1].step if found else 0
        assert newest >= known, f"step {known} was saved, {newest} is there"
        if found:
            model, optimizer = state_of(0)
            checkpoint.load(found[-1].path, model, optimizer)
            assert _is_of(newest, model)
        names = {str(info.path.name) for info in found}
        kept = sum(info.world + 1 for info in found)
        unfinished += len(objects(root)) > kept or bool(_prefixes(root) - names)
    return Killed(kills, newest, unfinished)


def told_to_go(acknowledged: Path, known: int) -> bool:
    return _last(acknowledged) > known


def _prefixes(root: Path) -> set[str]:
    return {name.partition("/")[0] for name in objects(root)} if root.exists() else set()


def spawn() -> None:
    """Fork two ranks for each line of input, so that no rank has to import torch again."""
    for line in sys.stdin:
        root, acknowledged, mode = line.split()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        pids = []
        for rank in range(_WORLD):
            pid = os.fork()
            if not pid:
                try:
                    rank_main(rank, port, root, Path(acknowledged), mode)
                finally:
                    os._exit(1)
            pids.append(pid)
        print(*pids, flush=True)
        for pid in pids:
            os.waitpid(pid, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        spawn()
    else:
        with tempfile.TemporaryDirectory() as place:
            print(run(Path(place), kills=int(sys.argv[1]), seed=0))
