"""Step time and bytes of training on several hosts, against PyTorch's own: namespaces as hosts.

All contenders live in the same processes and take their steps in turn; a figure is a ratio of
medians. Bytes are those that the busiest host sends in a step, by the counter of its interface,
beside what exchanges in two levels need: each shard once to each other host for every gather, and
one row for every rank of another host for every reduction.
"""

from __future__ import annotations

import copy
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from bench.contenders import CONTENDERS, FLAT, FSDP2, PER_PARAMETER, RAGGED, WIRES
from bench.hosts import NoHosts, enter, hosts, sent_nbytes
from bench.machine import Loaded, LoadGuard, table
from bench.models import GPT, SHAPES
from bench.step import one_step

__all__ = ["Case", "Found", "figures", "measured", "report"]

SHAPE = SHAPES["deep"]
NAMES = (FSDP2, PER_PARAMETER, RAGGED, FLAT)
WARM_UP, ROUNDS = 2, 7
ATTEMPTS = 4
BOUNDS = {1: 0.50, 2: 0.45, 4: 0.40}
"""Largest shares of FSDP2's step that are aimed at where the rate is limited, by ranks a host."""
SLACK = 0.05
"""How far bytes may be from those that two levels need."""


class Case(NamedTuple):
    """Hosts and their network."""

    num_hosts: int
    num_ranks: int
    """Of each host."""
    mbits: int | None
    """Million bits a second that a host sends at most."""

    def __str__(self) -> str:
        rate = "unlimited" if self.mbits is None else f"{self.mbits} Mbit/s"
        return f"{self.num_hosts} hosts x {self.num_ranks}, {rate}"


CASES = tuple(
    Case(*sizes, mbits) for sizes in ((2, 1), (2, 2), (2, 4), (3, 1)) for mbits in (200, 1000, None)
)


class Found(NamedTuple):
    """What one contender took."""

    seconds: float
    nbytes: float
    """Sent by one host in a step."""


def worker(
    process: int,
    case: Case,
    places: Sequence[str],
    names: Sequence[str],
    folder: str,
    rounds: int,
) -> None:
    """One rank, on one of the hosts ``places``, which trains all of ``names``; rank 0 writes."""
    enter(places[process // case.num_ranks])
    torch.set_num_threads(1)
    world = case.num_hosts * case.num_ranks
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=process, world_size=world)
    torch.manual_seed(0)
    base = GPT(SHAPE)
    tokens = torch.randint(SHAPE.vocab, (SHAPE.batch, SHAPE.length + 1))
    known = CONTENDERS | WIRES
    runs = {name: known[name].make(copy.deepcopy(base)) for name in names}
    guard = LoadGuard()
    found: dict[str, list[Found]] = {name: [] for name in runs}
    for number in range(WARM_UP + rounds):
        if number >= WARM_UP and (number - WARM_UP) % 3 == 0:
            dist.barrier()
            if process == 0:  # alone: where ranks outnumber cores, they would slow each other down
                guard.sample()
            dist.barrier()
        for name, (model, optimizer) in runs.items():
            dist.barrier()
            before = sent_nbytes()
            taken = one_step(model, optimizer, tokens).step
            dist.barrier()
            if number >= WARM_UP:
                found[name].append(Found(taken, sent_nbytes() - before))
    result = {
        name: Found(*map(statistics.median, zip(*taken, strict=True)))
        for name, taken in found.items()
    }
    if process == 0:
        said = {"found": result, "drift": guard.drift, "levels": needed_nbytes(case, base)}
        Path(folder, "results.json").write_text(json.dumps(said))
    dist.destroy_process_group()


def needed_nbytes(case: Case, model: nn.Module) -> tuple[float, float]:
    """Return the bytes that one host has to send in a step, for gathers and for reductions.

    Blocks are gathered twice, the root once; each parameter is reduced once. A gather takes this
    host's shards to each other host, a reduction one row to each rank there.
    """
    block = sum(p.nbytes for p in model.blocks.parameters())  # type: ignore[union-attr]
    whole = sum(p.nbytes for p in model.parameters())
    others = case.num_hosts - 1
    return others * (whole + block) / case.num_hosts, others * whole / case.num_hosts


def measured(
    case: Case, rounds: int = ROUNDS, *, refuses: bool = True, names: Sequence[str] = NAMES
) -> dict[str, Any]:
    """Let all of ``names`` train in this case; step times are shares of the first one's.

    Raises:
        Loaded: the machine was not idle, and ``refuses``.
        NoHosts: namespaces cannot be made.
    """
    with tempfile.TemporaryDirectory() as folder, hosts(case.num_hosts, case.mbits) as places:
        world = case.num_hosts * case.num_ranks
        mp.spawn(worker, (case, places, names, folder, rounds), nprocs=world)
        said: dict[str, Any] = json.loads(Path(folder, "results.json").read_text())
    if refuses and said["drift"] > LoadGuard.tolerance:
        raise Loaded(said["drift"])
    base = said["found"][names[0]][0]
    return {
        "step": {name: seconds / base for name, (seconds, _) in said["found"].items()},
        "megabytes": {name: nbytes / 1e6 for name, (_, nbytes) in said["found"].items()},
        "levels": sum(said["levels"]) / 1e6,
        "gathers": said["levels"][0] / sum(said["levels"]),
        "seconds of the first": base,
    }


def figures() -> dict[str, dict[str, Any]]:
    """By case: shares of FSDP2's step, bytes, and those that two levels need.

    A case during which the machine was loaded is measured again; if that happens ``ATTEMPTS``
    times, it is told and left out.
    """
    found = {}
    try:
        for case in CASES:
            for _ in range(ATTEMPTS):
                try:
                    found[str(case)] = measured(case)
                    break
                except Loaded as why:
                    print(f"{case}: {why}", flush=True)
            else:
                print(f"not measured: {case}")
    except NoHosts as why:
        print(f"not measured: {why}")
    return found


def report(found: dict[str, dict[str, Any]]) -> int:
    """Print the tables; how many bounds were missed."""
    print(f"step time as a share of torch {torch.__version__} FSDP2's\n")
    rows = [
        [
            case,
            *(f"{one['step'][name]:.2f}" for name in NAMES[1:]),
            f"{one['seconds of the first']:.3f}",
        ]
        for case, one in found.items()
    ]
    print(table(["hosts", *NAMES[1:], "seconds of FSDP2"], rows), end="\n\n")
    print("megabytes that a host sends in a step\n")
    rows = [
        [case, *(f"{one['megabytes'][name]:.1f}" for name in NAMES), f"{one['levels']:.1f}"]
        for case, one in found.items()
    ]
    print(table(["hosts", *NAMES, "needed in two levels"], rows), end="\n\n")
    missed = []
    for case in CASES:
        one = found.get(str(case))
        if one is None:
            continue
        for name in NAMES[1:]:
            share, nbytes = one["step"][name], one["megabytes"][name]
            bound = BOUNDS[case.num_ranks]
            if case.mbits is not None and share > bound:
                missed.append(f"{case}, {name}: {share:.2f} (bound {bound})")
            if abs(nbytes / one["levels"] - 1) > SLACK:
                missed.append(f"{case}, {name}: {nbytes:.1f} MB")
    print(f"bounds missed: {'; '.join(missed) or 'none'}")
    return len(missed)
