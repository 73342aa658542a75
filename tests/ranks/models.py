"""Models and helpers that many tests share; values come from arithmetic, not the global RNG."""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F

from fullshard import fully_shard
from fullshard.comm.ledger import ledgers


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return values in (-1, 1) that look random and depend only on the arguments."""
    index = torch.arange(math.prod(shape), dtype=torch.float64)
    return (
        torch.sin(index * 12.9898 + seed * 78.233 + 1).mul(43758.5453).frac().view(shape).to(dtype)
    )


def ids(*shape: int, vocab: int, seed: int = 0) -> Tensor:
    """Return token ids that depend only on the arguments."""
    return (noise(*shape, seed=seed).abs() * vocab).long().clamp_(max=vocab - 1)


def fill(model: nn.Module, scale: float = 0.4) -> nn.Module:
    """Give every parameter different values."""
    with torch.no_grad():
        for seed, param in enumerate(model.parameters()):
            values = noise(*param.shape, seed=seed, dtype=param.dtype) * scale
            param.copy_(values + 1 if param.dim() == 1 else values)
    return model


def shard_units(
    model: nn.Module,
    units: Iterable[nn.Module],
    by: Callable[..., Any] = fully_shard,
    **options: Any,
) -> Any:
    """Shard ``units``, modules of ``model``, then ``model``, all with the same options."""
    for unit in units:
        by(unit, **options)
    return by(model, **options)


class Trouble(Exception):
    """An error that only tests raise."""


class Fuse(torch.autograd.Function):
    """The identity function, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: type[BaseException]) -> Tensor:
        ctx.kind = kind
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ctx.kind


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim, bias=False)  # the bias gradient is only rounding noise
        self.value = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, wrap: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 3 * dim + 1), nn.GELU(), nn.Linear(3 * dim + 1, dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A small GPT with sizes that few numbers divide."""

    def __init__(
        self, *, vocab: int = 53, dim: int = 20, layers: int = 3, heads: int = 2, length: int = 7
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.position = nn.Parameter(torch.zeros(length, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.run_block: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = self.run_block(block, x)
        return self.head(self.norm(x))

    @staticmethod
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class OddModel(nn.Module):
    """A model with tied, frozen, unused and odd-sized parameters, some of fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.first = nn.Linear(6, 5)
        self.frozen = nn.Linear(5, 5, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.one_row = nn.Linear(5, 1)
        self.unused = nn.Linear(3, 2)
        self.back = nn.Linear(6, 6)
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y = torch.tanh(self.frozen(torch.tanh(self.first(x))))
        x = self.back(x) + self.one_row(y) * self.gain
        return self.head(x)


class Tied(nn.Module):
    """A model whose embedding and head share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


class Weighs(nn.Module):
    """A model whose weight has the input as its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


class Experts(nn.Module):
    """Two linear layers, of which each forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return x + self.experts[which](x)


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter in full."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def refusal(kind: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the message of the ``kind`` error that a call raises; fail if the call raises none."""
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def message_of(kind: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the message of the ``kind`` error that a call raises; "" if the call raises none."""
    try:
        call(*args, **kwargs)
    except kind as error:
        return str(error)
    return ""


@contextmanager
def heard(level: int = logging.INFO) -> Iterator[list[str]]:
    """Collect this rank's fullshard log records of the block, as ``LEVEL: message``."""
    said: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda one: said.append(f"{one.levelname}: {one.getMessage()}")
    logger = logging.getLogger("fullshard")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class Counted:
    """Count the collectives in a block: those of our ledgers, and PyTorch's operators.

    The collectives by which ranks first meet in a new group are not counted.
    """

    total = -1

    def __enter__(self) -> Counted:
        self._operators = CommDebugMode()
        self._operators.__enter__()
        self._before = _num_issued()
        return self

    def __exit__(self, *failure: object) -> None:
        ours = _num_issued() - self._before
        self._operators.__exit__(*failure)
        operators = self._operators.get_comm_counts().items()
        theirs = sum(count for which, count in operators if "alltoall_base_" not in str(which))
        self.total = ours + theirs


def _num_issued() -> int:
    return sum(one.num_issued for one in ledgers())


def shared_folder() -> Path:
    """Make a folder and return its path on all ranks."""
    names = [tempfile.mkdtemp(prefix="fullshard-test-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    return Path(str(names[0]))
