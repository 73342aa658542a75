"""Peak bytes of a rank: everything allocated, from building the model to the end of a third step.

One process plays one rank of eight with torch's fake process group; PyTorch's profiler notes what
its CPU allocator hands out and gets back.
"""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench import tracing
from bench.contenders import CONTENDERS, FSDP2, PER_PARAMETER, RAGGED
from bench.machine import table
from bench.models import GPT, SHAPES
from bench.step import one_step

__all__ = ["figures", "report"]

WORLD = 8
NAMES = ("unsharded", FSDP2, PER_PARAMETER, RAGGED)


def peaks(name: str, shape_name: str) -> tuple[int, int]:
    """Most bytes held in the third step, and bytes held after it."""
    shape = SHAPES[shape_name]
    gc.collect()  # or what an earlier one leaves behind would count as given back by this one
    with tracing.memory() as trace:
        torch.manual_seed(0)
        model, optimizer = CONTENDERS[name].make(GPT(shape))
        tokens = torch.randint(shape.vocab, (shape.batch, shape.length + 1))
        for _ in range(2):
            one_step(model, optimizer, tokens)
        trace.mark()
        one_step(model, optimizer, tokens)
    return trace.peak_nbytes, trace.held_nbytes


def figures() -> dict[str, dict[str, dict[str, float]]]:
    """By model and contender: peak and held bytes, as shares of FSDP2's."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    found = {}
    for shape in ("deep", "wide"):
        nbytes = {name: peaks(name, shape) for name in NAMES}
        peak, held = nbytes[FSDP2]
        found[shape] = {
            name: {"peak": one[0] / peak, "held": one[1] / held} for name, one in nbytes.items()
        }
    dist.destroy_process_group()
    return found


def report(found: dict[str, dict[str, dict[str, float]]]) -> int:
    """Print the table; nothing is promised."""
    print(f"bytes of a rank of {WORLD}, as a share of FSDP2's: at the peak / between steps\n")
    rows = [
        [shape, *(f"{shares[n]['peak']:.2f} / {shares[n]['held']:.2f}" for n in NAMES)]
        for shape, shares in found.items()
    ]
    print(table(["model", *NAMES], rows))
    return 0
