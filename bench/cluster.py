"""Step time and bytes of training on several hosts, against PyTorch's own: namespaces as hosts.

All contenders live in the same processes and take their steps in turn; a figure is a ratio of
medians. Bytes are those that the busiest host sends in a step, by the counter of its interface.
Beside them are the bytes that exchanges in two levels need. A gather sends each shard once to each
other host. A reduction sends one row for every rank of another host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from bench.compare import in_turns, medians, on_ranks, verdict
from bench.contenders import CONTENDERS, FLAT, FSDP2, PER_PARAMETER, RAGGED, WIRES
from bench.hosts import NoHosts, enter, hosts, sent_nbytes
from bench.machine import Loaded, table
from bench.models import GPT, SHAPES
from bench.step import Seconds, steps_of

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
    """The time and the traffic of one contender's step."""

    seconds: float
    nbytes: float
    """Sent by one host in a step."""


def counted(step: Callable[[], Seconds]) -> Found:
    """Take a step on all ranks; return its seconds and the bytes that this host sent."""
    before = sent_nbytes()
    taken = step().step
    dist.barrier()
    return Found(taken, sent_nbytes() - before)


def work(names: Sequence[str]) -> dict[str, Found]:
    """Train all of ``names`` in turns; return the medians on this rank."""
    known = CONTENDERS | WIRES
    steps = steps_of({name: known[name] for name in names}, SHAPE)
    calls = {name: partial(counted, step) for name, step in steps.items()}
    # One rank looks at the load: where ranks outnumber cores, they would slow each other down.
    return medians(in_turns(calls, warm_up=WARM_UP, rounds=ROUNDS, samples=3, alone=True))


def place(rank: int, case: Case, places: Sequence[str]) -> None:
    """Move this process to its host."""
    enter(places[rank // case.num_ranks])


def needed_nbytes(case: Case, model: nn.Module) -> tuple[float, float]:
    """Return the bytes that one host has to send in a step, for gathers and for reductions.

    Blocks are gathered twice, the root once; each parameter is reduced once. A gather takes this
    host's shards to each other host, a reduction one row to each rank there.
    """
    block = sum(p.nbytes for p in model.blocks.parameters())  # type: ignore[union-attr]
    whole = sum(p.nbytes for p in model.parameters())
    others = case.num_hosts - 1
    return others * (whole + block) / case.num_hosts, others * whole / case.num_hosts


def measured(case: Case, names: Sequence[str]) -> dict[str, Any]:
    """Let all of ``names`` train in this case; step times are shares of the first one's.

    Raises:
        Loaded: the machine was not idle.
        NoHosts: namespaces cannot be made.
    """
    world = case.num_hosts * case.num_ranks
    with hosts(case.num_hosts, case.mbits) as places:
        found = on_ranks(work, world, names, enter=partial(place, case=case, places=places))[0]
    base = found[names[0]].seconds
    levels = needed_nbytes(case, GPT(SHAPE))
    return {
        "step": {name: one.seconds / base for name, one in found.items()},
        "megabytes": {name: one.nbytes / 1e6 for name, one in found.items()},
        "levels": sum(levels) / 1e6,
        "gathers": levels[0] / sum(levels),
        "seconds of the first": base,
    }


def figures(
    cases: Sequence[Case] = CASES, names: Sequence[str] = NAMES
) -> dict[str, dict[str, Any]]:
    """By case: shares of the step of the first one, bytes, and those that two levels need.

    A case during which the machine was loaded is measured again; if that happens ``ATTEMPTS``
    times, it is told and left out.
    """
    found = {}
    try:
        for case in cases:
            for _ in range(ATTEMPTS):
                try:
                    found[str(case)] = measured(case, names)
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
    return verdict(missed)
