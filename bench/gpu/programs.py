"""Programs that only a device tells anything about: streams of the user, graphs, two processes."""

from __future__ import annotations

import copy
import threading
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard
from bench.contenders import units
from bench.gpu.machine import Failed, Machine, Verdict, same
from bench.gpu.model import SMALL, Block, Llama, sizes_for, tokens_of, train
from fullshard.frontend.ownership import unit_of


class Branches(nn.Module):
    """Two blocks side by side, the first on a stream of its own."""

    def __init__(self, machine: Machine, *, beside: bool) -> None:
        super().__init__()
        sizes = sizes_for(machine, SMALL)
        self.one, self.two = Block(sizes), Block(sizes)
        self.scale = nn.Parameter(torch.ones(sizes.dim))
        self._machine = machine
        self._stream = machine.accelerator.Stream(device=machine.device) if beside else None

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, dim) to the same."""
        accelerator, x = self._machine.accelerator, x * self.scale
        if self._stream is None:
            return self.one(x) + self.two(x)  # type: ignore[no-any-return]
        here = accelerator.current_stream(self._machine.device)
        self._stream.wait_stream(here)
        with accelerator.stream(self._stream):
            self._machine.sleep(2000)
            left = self.one(x)
        right = self.two(x)
        here.wait_stream(self._stream)
        return left + right  # type: ignore[no-any-return]


def _branched(machine: Machine, *, beside: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = Branches(machine, beside=beside).to(machine.device)
    for part in (model.one, model.two, model):
        fullshard.fully_shard(part, mp_policy=fullshard.MixedPrecisionPolicy(torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(1, 16, model.scale.shape[0], device=machine.device)
    for _ in range(4):
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    machine.synchronize()
    return [param.to_local().detach().cpu() for param in model.parameters()]  # type: ignore[attr-defined]


def two_streams(machine: Machine) -> Verdict:
    """A unit whose inner units ran on two streams, against the same on one."""
    with machine.alone():
        alike = same(_branched(machine, beside=True), _branched(machine, beside=False))
    return Verdict(passed=alike, notes=[] if alike else ["two compute streams change the result"])


class _Checkpointed(Llama):
    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)


def threads(machine: Machine) -> Verdict:
    """Checkpoints run again in autograd's thread; an optimizer of copies steps in ours."""
    sizes = sizes_for(machine, SMALL)
    tokens = tokens_of(machine, sizes, 16)
    with machine.alone():
        torch.manual_seed(0)
        plain = _Checkpointed(sizes).to(machine.device)
        model: Any = copy.deepcopy(plain)
        policy = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        units(fullshard.fully_shard, mp_policy=policy)(model)
        model.set_reshard_after_backward(False)
        sharded = list(model.parameters())
        masters = [nn.Parameter(param.to_local().data) for param in sharded]
        optimizer = torch.optim.SGD(masters, lr=0.5, foreach=True)
        first = model(tokens)
        first.backward()
        for master, param in zip(masters, sharded, strict=True):
            master.grad = param.grad.to_local()
        optimizer.step()
        second = model(tokens)
        machine.synchronize()
        unit = unit_of(model)
        assert unit is not None and unit.engine is not None
        is_ours = unit.engine.steps.thread == threading.get_ident()
    moved = abs(first.item() - second.item())
    figures = {"loss before": first.item(), "loss after": second.item()}
    if not is_ours:
        raise Failed("the engine took autograd's thread for the optimizer's")
    if moved == 0:
        raise Failed("a step of copies left units stale")
    return Verdict(passed=True, figures=figures)


def graphs(machine: Machine) -> Verdict:
    """The compiler by default against eager; what ``reduce-overhead`` and a capture come to."""
    notes, figures = [], {}
    with machine.alone():
        eager = _losses(machine, None)
        if not machine.is_real:
            return Verdict(passed=None, notes=["compiling takes a minute and shows nothing here"])
        compiled = _losses(machine, "default")
        figures["compiled by default, farthest loss"] = _farthest(eager, compiled)
        for name, trial in {
            "reduce-overhead": partial(_losses, machine, "reduce-overhead"),
            "capture of a step": partial(_captured, machine, keeps=True),
            "capture of a step that reshards": partial(_captured, machine, keeps=False),
        }.items():
            try:
                figures[f"{name}, farthest loss"] = _farthest(eager, trial())
            except Exception as error:
                notes.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    return Verdict(
        passed=figures["compiled by default, farthest loss"] < 0.05, figures=figures, notes=notes
    )


def _farthest(ones: list[float], others: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(ones, others, strict=True))


def _stepped(machine: Machine) -> tuple[Any, torch.optim.Optimizer, Tensor]:
    sizes = sizes_for(machine, SMALL)
    torch.manual_seed(0)
    model: Any = Llama(sizes).to(machine.device)
    policy = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    units(fullshard.fully_shard, mp_policy=policy)(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, tokens_of(machine, sizes, 64)


def _losses(machine: Machine, mode: str | None) -> list[float]:
    model, optimizer, tokens = _stepped(machine)
    if mode is not None:
        for block in model.blocks:
            block.compile(mode=mode)
    return [train(model, optimizer, tokens).item() for _ in range(4)]


def _captured(machine: Machine, *, keeps: bool) -> list[float]:
    """Capture forward, backward and step; ``keeps``: the memory of whole parameters."""
    model, optimizer, tokens = _stepped(machine)
    model.set_keep_unsharded_storage(keeps)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        losses = [train(model, optimizer, tokens).item() for _ in range(3)]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = train(model, optimizer, tokens)
    graph.replay()
    machine.synchronize()
    return [*losses, loss.item()]
