"""A model of your own, sharded: build it, one call, train.

    python examples/minimal.py                          # one process
    torchrun --nproc-per-node 2 examples/minimal.py     # two, each keeps half of every parameter

A two-layer GPT learns the bytes of this file. Takes seconds on a CPU.
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fullshard

STEPS, BATCH, TIME, DIM, HEADS = 60, 16, 64, 64, 4


class Block(nn.Module):
    """Causal attention and an MLP; ``shard_blocks`` makes each of them a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [batch, heads, time, dim of a head]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, DIM), nn.Embedding(TIME, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x)


torch.manual_seed(0)  # the same model on every process
model = GPT()
units = fullshard.shard_blocks(model)  # the one line that shards it
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # after sharding

rank, device = dist.get_rank(), next(model.parameters()).device
torch.manual_seed(1 + rank)  # other data on every process
text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
if rank == 0:
    print(units)

for step in range(1, STEPS + 1):
    starts = torch.randint(len(text) - TIME, (BATCH, 1))
    windows = text[starts + torch.arange(TIME + 1)].to(device)
    logits = model(windows[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and (step == 1 or step % 20 == 0):
        print(f"step {step} loss {loss.item():.3f}")

dist.destroy_process_group()
