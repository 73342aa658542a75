"""``Muon`` against whole matrices on every rank, and against AdamW; a part of ``bench optimizer``.

Newton-Schulz runs in fp32, for which CPUs have fast products.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from bench.compare import in_turns, medians, on_ranks, seconds_of, verdict
from bench.contenders import sharded_adamw, units
from bench.launches import Launches
from bench.machine import table
from bench.models import GPT, SHAPES
from bench.step import one_step
from fullshard import fully_shard
from fullshard.optim import Muon
from fullshard.optim.muon.full import FullMuon

WARM_UP, ROUNDS = 2, 6
STEP, BESIDE, KERNELS = "step", "beside Newton-Schulz", "kernels"
BOUNDS = {STEP: 0.35, BESIDE: 1.3}
"""Largest shares that are aimed at: of the step that gathers, and of AdamW's training step."""


class OnEveryRank:
    """The usual code of users: every rank gathers every matrix and steps all of it."""

    def __init__(self, matrices: list[nn.Parameter]) -> None:
        self._matrices = matrices
        self._wholes = [nn.Parameter(torch.zeros(param.shape)) for param in matrices]
        self._muon = FullMuon(self._wholes, ns_dtype="float32", batched=False)

    @torch.no_grad()
    def step(self) -> None:
        """Gather, step, and keep this rank's part."""
        for param, whole in zip(self._matrices, self._wholes, strict=True):
            whole.copy_(param.full_tensor())
            whole.grad = param.grad.full_tensor()
        self._muon.step()
        for param, whole in zip(self._matrices, self._wholes, strict=True):
            on_all = DTensor.from_local(whole.detach(), param.device_mesh, [Replicate()])
            param.copy_(on_all.redistribute(placements=param.placements))


def gathered() -> dict[str, float]:
    """Seconds and kernels of the optimizer's step of the deep model, ours and by hand."""
    torch.manual_seed(0)
    base = GPT(SHAPES["deep"])
    ours, theirs = copy.deepcopy(base), copy.deepcopy(base)
    units(fully_shard)(ours)
    units(torch_fully_shard)(theirs)
    muon = Muon(ours, ns_dtype=torch.float32, rule=_only_blocks)
    by_hand = OnEveryRank([p for p in theirs.blocks.parameters() if p.dim() == 2])
    for model in (ours, theirs):
        for param in model.parameters():
            whole = torch.randn(param.shape)
            param.grad = distribute_tensor(whole, param.device_mesh, param.placements)
    optimizers: dict[str, Any] = {"ours": muon, "by hand": by_hand}

    def step(one: Any) -> None:
        one.step()
        dist.barrier()  # owners end at other times

    calls = {name: partial(seconds_of, partial(step, one)) for name, one in optimizers.items()}
    seconds = medians(in_turns(calls, warm_up=WARM_UP, rounds=ROUNDS))
    launched: dict[str, int] = {}
    for name, one in optimizers.items():
        with Launches() as counter:
            one.step()
        launched[name] = counter.kernels
    return {
        STEP: seconds["ours"] / seconds["by hand"],
        KERNELS: launched["ours"],
        f"{KERNELS} by hand": launched["by hand"],
    }


def _only_blocks(name: str, info: Any) -> str | None:
    """Let both step the same matrices; everything else is AdamW's, here of nobody."""
    return "adamw" if not name.startswith("blocks.") else None


def beside() -> dict[str, float]:
    """A training step of the wide model with Muon without iterations, as a share of AdamW's."""
    torch.manual_seed(0)
    shape = SHAPES["wide"]
    base = GPT(shape)
    models = [units(fully_shard)(copy.deepcopy(base)) for _ in range(2)]
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length + 1))
    muon = Muon(models[0], ns_steps=0, ns_dtype=torch.float32)
    steps = {
        "muon": partial(one_step, models[0], muon, tokens),
        "adamw": partial(one_step, models[1], sharded_adamw(models[1].parameters()), tokens),
    }
    seconds = medians(in_turns(steps, warm_up=WARM_UP, rounds=2 * ROUNDS))
    return {BESIDE: seconds["muon"].step / seconds["adamw"].step}


def figures() -> dict[str, float]:
    """Shares of the two steps, and how many kernels ours launches on the first rank."""
    return on_ranks(gathered, 4)[0] | on_ranks(beside, 2)[0]


def report(found: dict[str, float]) -> int:
    """Print the table; how many bounds were missed."""
    print("\nMuon: its step as a share of that with full_tensor() on every rank (deep, 4 ranks);")
    print("a training step without iterations as a share of AdamW's (wide, 2 ranks)\n")
    shares = [f"{found[name]:.2f}" for name in (STEP, BESIDE)]
    counts = [f"{found[name]:.0f}" for name in (KERNELS, f"{KERNELS} by hand")]
    print(table([STEP, BESIDE, KERNELS, f"{KERNELS} by hand"], [[*shares, *counts]]))
    missed = [name for name, bound in BOUNDS.items() if found[name] > bound]
    return verdict(missed)
