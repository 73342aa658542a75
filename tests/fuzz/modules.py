"""The modules of random models: small, of odd sizes, with many features of real models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz.case import Model, Node

VOCAB = 5


class Planned(Exception):
    """An injected exception in a forward, a backward or a ``with`` block."""


@dataclass
class Record:
    """The dataclass that some modules take and return."""

    x: Tensor
    ids: Tensor


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Planned("in backward")


class Block(nn.Module):
    """The module of a node. Programs change its plain attributes ``times`` and ``fails``."""

    def __init__(self, number: int, node: Node, width: int, children: list[nn.Module]) -> None:
        super().__init__()
        self.number, self.node = number, node
        self.times = node.times
        self.fails = ""
        self.inner = nn.ModuleList(children)
        getattr(self, f"_make_{node.kind}")(width, node.size)
        for name in node.frozen:
            self.get_parameter(name).requires_grad_(False)

    def _make_sequence(self, width: int, size: int) -> None:
        pass

    _make_residual = _make_sequence

    def _make_linear(self, width: int, size: int) -> None:
        self.up = nn.Linear(width, size, bias=self.node.bias)
        self.down = nn.Linear(size, width, bias=False)

    def _make_norm(self, width: int, size: int) -> None:
        # A large eps, as in the optimizers, keeps rounding differences small.
        self.norm = nn.LayerNorm(width, eps=0.1, bias=self.node.bias)

    def _make_gain(self, width: int, size: int) -> None:
        """Make parameters on the block itself, without a submodule."""
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.ones(1))

    def _make_scalar(self, width: int, size: int) -> None:
        self.weight = nn.Parameter(torch.ones(()))

    def _make_embed(self, width: int, size: int) -> None:
        self.embed = nn.Embedding(VOCAB, width)

    def _make_conv(self, width: int, size: int) -> None:
        self.conv = nn.Conv1d(1, size, 3, padding=1, bias=self.node.bias)

    def _make_empty(self, width: int, size: int) -> None:
        self.first = nn.Parameter(torch.zeros(0, width))
        self.weight = nn.Parameter(torch.ones(width, 1))
        self.last = nn.Parameter(torch.zeros(0))

    def _make_unused(self, width: int, size: int) -> None:
        """Make a parameter that forward uses, and one that it does not use."""
        self.weight = nn.Parameter(torch.ones(width))
        self.spare = nn.Parameter(torch.ones(size, 2))

    def _make_buffer(self, width: int, size: int) -> None:
        self.weight = nn.Parameter(torch.ones(width))
        self.register_buffer("shift", torch.linspace(0, 1, width, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x, ids = _unpacked(args, kwargs)
        if self.fails == "forward":
            raise Planned("in forward")
        x = self._compute(x, ids)
        if self.fails == "backward" and x.requires_grad:
            x = _FailsInBackward.apply(x)
        return _packed(self.node.io, x, ids)

    def _compute(self, x: Tensor, ids: Tensor) -> Tensor:
        for child in self.inner:
            y = invoke(child, x, ids)
            x = x + y if self.node.kind == "residual" else y
        kind = self.node.kind
        if kind == "linear":
            return torch.tanh(self.down(torch.tanh(self.up(x))))
        if kind == "norm":
            return self.norm(x)
        if kind == "gain":
            return torch.tanh(x * self.weight + self.bias)
        if kind == "scalar":
            return torch.tanh(x * self.weight)
        if kind == "embed":
            return x + self.embed(ids)
        if kind == "conv":
            return x + torch.tanh(self.conv(x.unsqueeze(1))).mean(1)
        if kind == "empty":
            nothing = (x @ self.first.t()).sum(1, keepdim=True) + self.last.sum()
            return torch.tanh(x + x @ self.weight) + nothing
        if kind == "unused":
            return torch.tanh(x * self.weight)
        if kind == "buffer":
            self.calls += 1
            return torch.tanh(x * self.weight + self.shift)
        return x


def invoke(child: Any, x: Tensor, ids: Tensor) -> Tensor:
    """Call a block or its wrapper, with the repetitions, format and checkpoints of its node."""

    def run(x: Tensor, ids: Tensor) -> Tensor:
        io = child.node.io
        if io == "kwargs":
            return child(ids=ids, x=x)
        if io == "tensor":
            return child(x, ids)
        return _unpacked((child(_packed(io, x, ids)),), {})[0]

    for _ in range(child.times):
        if child.node.checkpoint and torch.is_grad_enabled():
            reentrant = child.node.checkpoint == "reentrant"
            x = checkpoint(run, x, ids, use_reentrant=reentrant, preserve_rng_state=False)
        else:
            x = run(x, ids)
    return x


def _packed(io: str, x: Tensor, ids: Tensor) -> Any:
    if io == "tuple":
        return (x, ids)
    if io == "dict":
        return {"ids": ids, "x": x}
    if io == "record":
        return Record(x, ids)
    return x


def _unpacked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    if kwargs:
        return kwargs["x"], kwargs["ids"]
    if len(args) == 2:
        return args
    (one,) = args
    if isinstance(one, Record):
        return one.x, one.ids
    if isinstance(one, dict):
        return one["x"], one["ids"]
    return one


def build(model: Model, *, seed: int) -> Block:
    """Return the unsharded model in fp64, with values that depend on ``seed`` alone."""
    blocks: list[Block] = []
    for number, node in enumerate(model.nodes):
        children: list[nn.Module] = [blocks[child] for child in node.children]
        blocks.append(Block(number, node, model.width, children).double())
    for one, name, other, there in model.ties:
        owner = blocks[one].get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], blocks[other].get_parameter(there))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in blocks[-1].parameters():
            values = torch.rand(param.shape, generator=generator, dtype=param.dtype)
            param.copy_(values * 1.2 - 0.6)
    return blocks[-1]


def blocks_of(model: nn.Module) -> dict[int, Block]:
    """Return the blocks in ``model`` by number, without their wrappers."""
    return {one.number: one for one in model.modules() if isinstance(one, Block)}
