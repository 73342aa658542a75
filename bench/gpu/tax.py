"""The cost of a wrapper at world size 1, and the work of one rank of many on its host.

``tax`` trains models of the shapes of Llama-3 (no rotary embedding; fewer layers of 8B, so that
they fit) with a batch of 4 x 4,096 tokens, in bf16 with reductions in fp32. Each contender runs in
a process of its own, all in turns, three times. At world size 1 our shards are the parameters
themselves, which favours us. Nothing is said about wires.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from bench.contenders import FSDP2, PER_PARAMETER, RAGGED, Contender, units
from bench.gpu.costs import NAMES, launched, measured, peak
from bench.gpu.machine import Machine, Verdict
from bench.gpu.model import TINY, Llama, Sizes, contenders, fused_adamw

SHAPES = {
    "1B": Sizes(dim=2048, hidden=8192, heads=32, layers=16, vocab=128256, kv_heads=8),
    "8B": Sizes(dim=4096, hidden=14336, heads=32, layers=6, vocab=128256, kv_heads=8),
}
RECOMPUTED = frozenset({"8B"})
"""Shapes whose blocks are computed again in backward."""

BATCH, LENGTH = 4, 4096
ROUNDS, WARM_UP, STEPS = 3, 4, 8
LOSS_CHUNKS = 16
PEAK_FLOPS = 989e12
"""Of an H100 or H200, dense, in bf16."""

UNWRAPPED, DDP, TUNED = "unwrapped", "DDP", "torch FSDP2, tuned"
LOW = torch.bfloat16


class Trained(Llama):
    """A Llama that can recompute its blocks, with a loss that never holds all logits at once."""

    def __init__(self, sizes: Sizes, *, recomputes: bool) -> None:
        super().__init__(sizes)
        self._recomputes = recomputes

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        """See ``Llama``."""
        if not self._recomputes:
            return super().run_block(block, x)
        return checkpoint(block, x, use_reentrant=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length + 1) token ids to a loss."""
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = self.run_block(block, x)
        rows, wanted = self.norm(x).flatten(0, 1), tokens[:, 1:].flatten()
        parts = zip(rows.chunk(LOSS_CHUNKS), wanted.chunk(LOSS_CHUNKS), strict=True)
        losses = [checkpoint(self._loss, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum() / len(wanted)

    def _loss(self, rows: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(self.head(rows).float(), wanted, reduction="sum")


def _as_it_is(model: Any) -> Any:
    return model


def _tuned(model: Any) -> Any:
    """Keep parameters after forward, and gather the next block by hand."""
    policy = TorchPolicy(LOW, torch.float32)
    model = units(torch_fully_shard, mp_policy=policy, reshard_after_forward=False)(model)
    blocks = list(model.blocks)
    for one, following in itertools.pairwise(blocks):
        one.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([one])
    return model


def _ways(machine: Machine) -> dict[str, Contender]:
    # Gloo's threads may wait for the interpreter while DDP, in a destructor, waits for them.
    ddp: Any = DistributedDataParallel if machine.is_real else _as_it_is
    return {
        UNWRAPPED: Contender(_as_it_is, fused_adamw),
        DDP: Contender(ddp, fused_adamw),
        TUNED: Contender(_tuned, fused_adamw),
        **contenders(machine, world=1),
    }


CONTENDERS = (UNWRAPPED, DDP, FSDP2, TUNED, PER_PARAMETER, RAGGED)


def trained(machine: Machine, name: str, shape: str, compiled: bool) -> dict[str, Any]:
    """Train the only model in this process; return times of steps, peaks and the last loss."""
    with machine.alone():
        way = _ways(machine)[name]
        is_cast = name in (UNWRAPPED, DDP)  # by autocast; others cast by themselves
        sizes = SHAPES[shape] if machine.is_real else TINY
        torch.manual_seed(0)
        model: Any = Trained(sizes, recomputes=shape in RECOMPUTED).to(machine.device)
        if compiled and machine.is_real:
            for block in model.blocks:
                block.compile()
        model, optimizer = way.make(model)
        length = LENGTH if machine.is_real else 16
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(sizes.vocab, (BATCH, length + 1), generator=generator)
        tokens = tokens.to(machine.device)

        def step() -> Tensor:
            with torch.autocast(machine.device.type, LOW, enabled=is_cast):
                loss: Tensor = model(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        for _ in range(WARM_UP if machine.is_real else 1):
            step()
        machine.synchronize()
        machine.reset_peaks()
        times, loss = _timed(machine, step, STEPS if machine.is_real else 1)
        return {"seconds": times, "loss": loss.item(), **machine.memory()}


def _timed(machine: Machine, step: Callable[[], Tensor], count: int) -> tuple[list[float], Tensor]:
    """Return the device time of each step, in seconds, and the last loss; on a CPU, host time."""
    accelerator = machine.accelerator
    ends = [accelerator.Event(enable_timing=True) for _ in range(count + 1)]
    ends[0].record()
    started = time.perf_counter()
    for end in ends[1:]:
        loss = step()
        end.record()
    machine.synchronize()
    if not machine.is_real:
        return [(time.perf_counter() - started) / count] * count, loss
    pairs = itertools.pairwise(ends)
    return [one.elapsed_time(other) / 1e3 for one, other in pairs], loss


def flops(sizes: Sizes, tokens: int, length: int) -> float:
    """Return what a step needs, without recomputation: products of weights and of attention."""
    kv = sizes.dim // sizes.heads * (sizes.kv_heads or sizes.heads)
    block = 2 * sizes.dim * (sizes.dim + kv) + 3 * sizes.dim * sizes.hidden
    weights = sizes.layers * block + sizes.vocab * sizes.dim
    attention = sizes.layers * sizes.dim * length  # causal: half of 2 * length * dim
    return 6.0 * tokens * (weights + attention)


def _tax(machine: Machine, shape: str, *, compiled: bool) -> Verdict:
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    for _ in range(ROUNDS if machine.is_real else 1):
        for name in CONTENDERS:
            runs[name].append(machine.apart(trained, name, shape, compiled))
    medians = {
        name: statistics.median(time_s for run in found for time_s in run["seconds"])
        for name, found in runs.items()
    }
    sizes = SHAPES[shape] if machine.is_real else TINY
    length = LENGTH if machine.is_real else 16
    figures = {}
    for name, found in runs.items():
        times = sorted(time_s for run in found for time_s in run["seconds"])
        figures[name] = {
            "tokens/s": BATCH * length / medians[name],
            "MFU": flops(sizes, BATCH * length, length) / medians[name] / PEAK_FLOPS,
            "of unwrapped": medians[name] / medians[UNWRAPPED],
            "of FSDP2": medians[name] / medians[FSDP2],
            "ms": 1e3 * medians[name],
            "least ms": 1e3 * times[0],
            "most ms": 1e3 * times[-1],
            "peak allocated": found[-1]["peak allocated"],
            "peak reserved": found[-1]["peak reserved"],
            "loss": found[-1]["loss"],
        }
    losses = [one["loss"] for one in figures.values()]
    near = max(losses) - min(losses) < 0.05 * max(losses)
    return Verdict(passed=near, figures=figures, notes=[] if near else ["losses differ"])


def tax_1b(machine: Machine) -> Verdict:
    """Steps of Llama-3 1B at world size 1, by wrapper, in turns; eager."""
    return _tax(machine, "1B", compiled=False)


def tax_8b(machine: Machine) -> Verdict:
    """Steps of six layers of Llama-3 8B, recomputed, at world size 1; eager."""
    return _tax(machine, "8B", compiled=False)


def tax_compiled(machine: Machine) -> Verdict:
    """Steps of six layers of Llama-3 8B, recomputed, at world size 1; compiled by blocks."""
    return _tax(machine, "8B", compiled=True)


def one_rank(machine: Machine, name: str, world: int) -> dict[str, Any]:
    """Return host time, kernels and peaks of a step, of the only model in its process."""
    found: dict[str, Any] = dict(measured(machine, name, 128, world))
    found |= launched(machine, name, world)
    return found | peak(machine, name, 1, world)


def hosts(machine: Machine) -> Verdict:
    """One rank of 8, 64 and 1,024, NO COMMUNICATION: host time, kernels, copies, peaks."""
    figures = {
        f"{world} ranks, {name}": machine.apart(one_rank, name, world)
        for world in ((8, 64, 1024) if machine.is_real else (8,))
        for name in NAMES
    }
    return Verdict(passed=True, figures=figures)
