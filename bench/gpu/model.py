"""Blocks like Llama's, and the ways to shard them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fullshard
from bench.contenders import FSDP2, PER_PARAMETER, RAGGED, Contender, units
from bench.gpu.machine import WORLD, Machine


@dataclass(frozen=True)
class Sizes:
    """Of a model."""

    dim: int
    hidden: int
    heads: int
    layers: int
    vocab: int
    kv_heads: int | None = None
    """Of keys and values; None: as many as ``heads``."""


LARGE = Sizes(dim=2048, hidden=5632, heads=16, layers=12, vocab=32000)
SMALL = Sizes(dim=256, hidden=704, heads=4, layers=4, vocab=512)
TINY = Sizes(dim=32, hidden=48, heads=2, layers=3, vocab=64)


def sizes_for(machine: Machine, sizes: Sizes) -> Sizes:
    """The stand-in is not there to be measured."""
    return sizes if machine.is_real else TINY


class Block(nn.Module):
    """Attention and gated MLP without biases, nine parameters."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        dim, hidden = sizes.dim, sizes.hidden
        self.heads, self.kv_heads = sizes.heads, sizes.kv_heads or sizes.heads
        few = dim // self.heads * self.kv_heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(dim, few, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, dim) to the same."""
        y = self.norm1(x)
        q, k, v = (
            layer(y).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer, heads in (
                (self.q, self.heads),
                (self.k, self.kv_heads),
                (self.v, self.kv_heads),
            )
        )
        is_grouped = self.heads != self.kv_heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Blocks between embedding and head; forward returns the loss."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocab, sizes.dim)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.dim)
        self.head = nn.Linear(sizes.dim, sizes.vocab, bias=False)

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        """Run a block; checks override this."""
        return block(x)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length + 1) token ids to a loss."""
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = self.run_block(block, x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def tokens_of(machine: Machine, sizes: Sizes, length: int, number: int = 0) -> Tensor:
    """(1, length + 1) ids, the same for the same number."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(sizes.vocab, (1, length + 1), generator=generator).to(machine.device)


def contenders(machine: Machine, world: int = WORLD) -> dict[str, Contender]:
    """FSDP2 and ours in bf16 with fp32 reduction, each with the AdamW that one would use."""
    mesh = init_device_mesh(machine.device.type, (world,))
    policy = fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    theirs = units(
        torch_fully_shard, mesh=mesh, mp_policy=TorchPolicy(torch.bfloat16, torch.float32)
    )
    ours = units(fullshard.fully_shard, mesh=mesh, mp_policy=policy)
    ragged = units(fullshard.fully_shard, mesh=mesh, mp_policy=policy, layout=fullshard.Ragged())

    def sharded(params: Any) -> torch.optim.Optimizer:
        return fullshard.optim.ShardedOptimizer(params, torch.optim.AdamW, lr=1e-4, fused=True)

    return {
        FSDP2: Contender(theirs, fused_adamw),
        PER_PARAMETER: Contender(ours, fused_adamw),
        RAGGED: Contender(ragged, sharded),
    }


def fused_adamw(params: Any) -> torch.optim.Optimizer:
    """The AdamW that one would use on a GPU."""
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def made(
    machine: Machine, name: str, sizes: Sizes, world: int = WORLD
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A contender's model on the device, and its optimizer."""
    torch.manual_seed(0)
    return contenders(machine, world)[name].make(copy.deepcopy(Llama(sizes)).to(machine.device))


def made_from_meta(
    machine: Machine, name: str, sizes: Sizes, world: int = WORLD
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same, of which only the shards ever have memory, with other weights."""
    contender = contenders(machine, world)[name]
    with torch.device("meta"):
        model = contender.prepare(Llama(sizes))
    model.to_empty(device=machine.device)
    for param in model.parameters():
        nn.init.normal_(param.to_local() if isinstance(param, DTensor) else param, std=0.02)
    return model, contender.optimizer(model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    """One step; the loss, still on the device."""
    loss: Tensor = model(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
