"""A model with one parameter of each kind, and PyTorch's Muon and AdamW for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from tests.ranks.models import noise

__all__ = ["BY_MUON", "DIM", "ROWS", "VOCAB", "Model", "Reference", "backward"]

VOCAB, DIM, ROWS = 48, 16, 12


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(3, 2 * DIM, DIM))
        self.down = nn.Parameter(torch.zeros(3, DIM, 2 * DIM))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("btd,efd,eof->bto", x, self.up, self.down)


class Model(nn.Module):
    """A model with one parameter of each kind."""

    def __init__(self, head: str = "decoder", *, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.pos_embed = nn.Parameter(torch.zeros(1, 8, DIM))
        self.mix = nn.Conv1d(DIM, DIM, kernel_size=1)
        self.norm = nn.LayerNorm([8, DIM])
        self.layers = nn.ModuleList([nn.Linear(DIM, VOCAB), nn.Linear(VOCAB, DIM), Experts()])
        self.head = head
        setattr(self, head, nn.Linear(DIM, VOCAB, bias=False))
        if tied:
            getattr(self, head).weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.pos_embed
        x = self.norm(self.mix(x.mT).mT)
        for layer in self.layers:
            x = layer(x)
        return getattr(self, self.head)(x)


BY_MUON = {
    "mix.weight",
    "layers.0.weight",
    "layers.1.weight",
    "layers.2.up",
    "layers.2.down",
}


def backward(model: nn.Module, number: int, rank: int = 0, world: int = 1) -> None:
    """Compute the gradients of this rank's share of batch ``number``."""
    ids = (noise(ROWS, 8, seed=number).abs() * VOCAB).long().clamp_(max=VOCAB - 1)
    mine = ids[rank * ROWS // world : (rank + 1) * ROWS // world]
    out = model(mine)
    (out * noise(VOCAB, seed=9, dtype=out.dtype)).square().mean().backward()


class Reference:
    """PyTorch's Muon and AdamW; to Muon, each matrix of a stack is its own parameter."""

    def __init__(self, model: nn.Module, lr: float, adamw: dict[str, Any], **options: Any) -> None:
        named = dict(model.named_parameters())
        views = [p for name, p in named.items() if name in BY_MUON]
        self.views = [(p, self.cut(p.detach())) for p in views]
        self.muon = torch.optim.Muon([v for _, own in self.views for v in own], lr=lr, **options)
        self.adamw = AdamW([p for n, p in named.items() if n not in BY_MUON], **adamw)

    @staticmethod
    def cut(tensor: Tensor) -> list[Tensor]:
        stack = tensor.flatten(1)[None] if tensor.shape[-1] == 1 else tensor
        return list(stack) if stack.dim() == 3 else [stack]

    def step(self) -> None:
        for param, own in self.views:
            grads = [None] * len(own) if param.grad is None else self.cut(param.grad)
            for view, grad in zip(own, grads, strict=True):
                view.grad = grad
        self.muon.step()
        self.adamw.step()
