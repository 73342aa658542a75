"""The CUDA counterpart on one GPU: step, host time and peak memory of Llama-like blocks.

One GPU plays one rank of eight: torch's fake process group fills gathered buffers with our own
slice, so kernels, streams, copies and the allocator are real and the network is not. bf16 compute,
fp32 reduction. Figures are ratios to FSDP2, taken in one run, in turns.

    python -m bench gpu
"""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import fullshard
from bench.contenders import FSDP2, PER_PARAMETER, RAGGED, Contender, units
from bench.machine import table

__all__ = ["figures", "report"]

WORLD = 8
WARM_UP, ROUNDS = 5, 20
DIM, HIDDEN, HEADS, LAYERS, VOCAB = 2048, 5632, 16, 12, 32000
LENGTHS = {"compute-bound": 4096, "host-bound": 128}


class Norm(nn.Module):
    """Root mean square, with a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        """(..., DIM) to the same."""
        return F.rms_norm(x, (DIM,), self.weight)


class Block(nn.Module):
    """Attention and gated MLP without biases, nine parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(), Norm()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, DIM) to the same."""
        y = self.norm1(x)
        q, k, v = (
            layer(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Blocks between embedding and head; forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm()
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length + 1) token ids to a loss."""
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def contenders() -> dict[str, Contender]:
    """FSDP2 and ours, each with the fused AdamW that one would use."""
    mesh = init_device_mesh("cuda", (WORLD,))
    policy = fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    theirs = units(
        torch_fully_shard, mesh=mesh, mp_policy=TorchPolicy(torch.bfloat16, torch.float32)
    )
    ours = units(fullshard.fully_shard, mesh=mesh, mp_policy=policy)
    ragged = units(fullshard.fully_shard, mesh=mesh, mp_policy=policy, layout=fullshard.Ragged())

    def fused(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-4, fused=True)

    def sharded(params: Any) -> torch.optim.Optimizer:
        return fullshard.optim.ShardedOptimizer(params, torch.optim.AdamW, lr=1e-4, fused=True)

    return {
        FSDP2: Contender(theirs, fused),
        PER_PARAMETER: Contender(ours, fused),
        RAGGED: Contender(ragged, sharded),
    }


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> tuple[float, float]:
    """Seconds until the host is done with a step, and until the device is."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    model(tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    return host, time.perf_counter() - start


def measure(length: int) -> dict[str, dict[str, float]]:
    """By contender: median host and step seconds, and peak bytes above those held."""
    base = Llama()
    tokens = torch.randint(VOCAB, (1, length + 1), device="cuda")
    runs = {name: one.make(copy.deepcopy(base).cuda()) for name, one in contenders().items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    peak: dict[str, int] = {}
    for number in range(WARM_UP + ROUNDS):
        for name, (model, optimizer) in runs.items():
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            seconds = step(model, optimizer, tokens)
            peak[name] = torch.cuda.max_memory_allocated() - held
            if number >= WARM_UP:
                taken[name].append(seconds)
    found = {}
    for name, seconds in taken.items():
        host, whole = (statistics.median(one) for one in zip(*seconds, strict=True))
        found[name] = {"host": host, "step": whole, "peak bytes": float(peak[name])}
    return found


def figures() -> dict[str, dict[str, dict[str, float]]]:
    """By regime and contender, shares of FSDP2's; empty where there is no GPU."""
    if not torch.cuda.is_available():
        return {}
    torch.cuda.set_device(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    found = {}
    for regime, length in LENGTHS.items():
        figures = measure(length)
        found[regime] = {
            name: {what: value / figures[FSDP2][what] for what, value in one.items()}
            for name, one in figures.items()
        }
    dist.destroy_process_group()
    return found


def report(found: dict[str, dict[str, dict[str, float]]]) -> int:
    """Print the table; nothing is promised."""
    if not found:
        print("gpu: no CUDA device, nothing was measured")
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, a share of FSDP2's\n")
    kinds = ("host", "step", "peak bytes")
    rows = [
        [regime, name, *(f"{one[kind]:.2f}" for kind in kinds)]
        for regime, shares in found.items()
        for name, one in shares.items()
    ]
    print(table(["regime", "", *kinds], rows))
    return 0
