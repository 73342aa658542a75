"""Host time: what sharding adds to a step when communication costs nothing.

One process plays one rank of many. At world 8 torch's fake process group stands in for the others.
At 1,024 ranks the fake group itself would take half a millisecond a gather. There collectives do
nothing and leave their outputs as they are. A figure is a contender's step minus the unsharded
step, as a share of the same difference for FSDP2. It is negative where the optimizer saves more
than sharding adds.
"""

from __future__ import annotations

import copy
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.compare import apart, in_turns, medians, verdict
from bench.contenders import CONTENDERS, FSDP2, PER_PARAMETER, RAGGED
from bench.machine import grid, idle
from bench.models import GPT, SHAPES
from bench.step import one_step
from fullshard.comm import Done, Pending, ledger
from fullshard.comm.ledger import Ledger

WARM_UP, ROUNDS = 5, 40
BACKENDS = {8: "fake", 1024: "pass"}
BOUNDS = {RAGGED: 0.05, PER_PARAMETER: 0.55, "per-parameter, ShardedOptimizer": 0.10}
"""Largest shares at world 8 that are aimed at."""

UNWATCHED = {f"{name}, no ledger": name for name in (PER_PARAMETER, RAGGED)}
"""The same without notes of what was issued, by the name that they have in the table."""

LEDGER = "ledger"
"""The seconds that these notes take in a step, and their share of the shortest sharded step."""

NAMES = ("unsharded", FSDP2, PER_PARAMETER, "per-parameter, ShardedOptimizer", RAGGED, *UNWATCHED)


def _issue_only(
    _: Ledger, kind: str, label: str, nbytes: int, start: Callable[[], Pending], mark: object
) -> Pending:
    return start()


def _ledger_seconds(step: Callable[[], object]) -> float:
    """Return how long ``step`` takes to note what it issues, and that it waits for it."""
    ledgers = ledger.ledgers()
    before = sum(one.num_issued for one in ledgers)
    step()
    num_issued = sum(one.num_issued for one in ledgers) - before
    one, label, repeat = ledgers[0], "unit blocks.0 (weight; digest 1)", 10_000
    noted = timeit.repeat(lambda: one.issue("gather", label, 8, Done).wait(), number=repeat)
    alone = timeit.repeat(lambda: Done().wait(), number=repeat)
    return num_issued * (min(noted) - min(alone)) / repeat


class _Done(dist.Work):
    """A collective that moved nothing."""

    def wait(self, timeout: Any = None) -> bool:
        """At once."""
        return True


class PassThrough(dist.ProcessGroup):
    """A group whose collectives do nothing at all."""

    def _allgather_base(self, output: Tensor, source: Tensor, options: Any = None) -> dist.Work:
        if source.dtype is torch.uint8:  # in the first step ranks compare what they are to gather
            output.view(-1, source.numel()).copy_(source)
        return _Done()

    def _reduce_scatter_base(
        self, output: Tensor, source: Tensor, options: Any = None
    ) -> dist.Work:
        return _Done()

    all_gather_single = _allgather_base  # as 2.13 calls them
    reduce_scatter_single = _reduce_scatter_base

    def getBackendName(self) -> str:
        """As registered."""
        return "pass"

    # Meshes and our code ask groups for these; torch answers for its own backends only.

    @property
    def group_name(self) -> str:
        """Its name."""
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> PassThrough:
        return self

    def name(self) -> str:
        """As registered."""
        return "pass"


def join_world(world: int) -> None:
    """Be rank 0 of ``world`` ranks that are not there."""
    if BACKENDS[world] == "pass":
        dist.Backend.register_backend(
            "pass", lambda store, rank, size, timeout: PassThrough(rank, size), devices="cpu"
        )
    dist.init_process_group(BACKENDS[world], store=FakeStore(), rank=0, world_size=world)


def measure(world: int) -> dict[str, float]:
    """Return median step seconds of every contender, and those of the ledger."""
    torch.set_num_threads(1)
    join_world(world)
    shape = SHAPES["many tiny"]
    torch.manual_seed(0)
    base = GPT(shape)
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length + 1))
    runs = {name: CONTENDERS[UNWATCHED.get(name, name)].make(copy.deepcopy(base)) for name in NAMES}

    def step_of(name: str) -> float:
        model, optimizer = runs[name]
        with torch.no_grad():  # what passes through is not what the weights were
            for param in model.parameters():
                param.zero_()
        issue = _issue_only if name in UNWATCHED else Ledger.issue
        with mock.patch.object(Ledger, "issue", issue):
            return one_step(model, optimizer, tokens).step

    steps = {name: partial(step_of, name) for name in NAMES}
    seconds = medians(in_turns(steps, warm_up=WARM_UP, rounds=ROUNDS, meets=False))
    return seconds | {LEDGER: _ledger_seconds(lambda: one_step(*runs[RAGGED], tokens))}


def figures() -> dict[str, dict[str, float]]:
    """By world and contender, the share of what FSDP2 adds.

    Raises:
        Loaded: the machine was not idle.
    """
    found = {}
    with idle():
        for world in BACKENDS:
            seconds = apart(measure, world)
            of_ledger = seconds.pop(LEDGER) / seconds[RAGGED]
            whole = seconds[FSDP2] - seconds["unsharded"]
            shares = {n: (s - seconds["unsharded"]) / whole for n, s in seconds.items()}
            found[str(world)] = {**shares, LEDGER: of_ledger}
    return found


def report(found: dict[str, dict[str, float]]) -> int:
    """Print the table; how many bounds were missed."""
    print("host time that sharding adds to a step, as a share of what FSDP2 adds (many tiny)\n")
    print(grid("world", found, NAMES[1:]))
    of_ledger = ", ".join(f"{shares[LEDGER]:.2%}" for shares in found.values())
    print(f"\nthe ledger's share of a ragged step: {of_ledger} (bound 1%)")
    missed = [n for n, bound in BOUNDS.items() if found["8"][n] > bound]
    missed += [LEDGER] if found["8"][LEDGER] > 0.01 else []
    return verdict(missed, "bounds at world 8 missed")
