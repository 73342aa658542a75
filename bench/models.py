"""The three GPTs that the step benchmark trains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of one rank's batch."""

    vocab: int
    dim: int
    layers: int
    heads: int
    length: int
    batch: int


SHAPES = {
    "deep": Shape(vocab=512, dim=256, layers=8, heads=4, length=64, batch=2),
    "wide": Shape(vocab=4096, dim=768, layers=4, heads=12, length=64, batch=1),
    "many tiny": Shape(vocab=256, dim=64, layers=16, heads=4, length=32, batch=2),
}


class Block(nn.Module):
    """Attention and MLP, twelve parameters."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(shape.dim)
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim)
        self.out = nn.Linear(shape.dim, shape.dim)
        self.norm2 = nn.LayerNorm(shape.dim)
        self.up = nn.Linear(shape.dim, 4 * shape.dim)
        self.down = nn.Linear(4 * shape.dim, shape.dim)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, dim) to the same."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Untied GPT; forward returns the loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.dim)
        self.position = nn.Parameter(torch.zeros(shape.length, shape.dim))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length + 1) token ids to the mean loss of predicting each from those before."""
        x = self.embed(tokens[:, :-1]) + self.position
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
