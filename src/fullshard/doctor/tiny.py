"""Steps of a model of tiny units, whose time is that of the engine: measured, and planned."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.doctor.links import settle
from fullshard.frontend import fully_shard
from fullshard.plan import Hardware, plan

_UNITS, _DIM = 12, 16
_WARM_UP, _STEPS = 3, 15


def _model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(_DIM, _DIM) for _ in range(_UNITS)))


def _shard(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def tiny_step_s(mesh: DeviceMesh, device: torch.device) -> float | None:
    """Return the median time of a forward and backward; all ranks of ``mesh`` call this together.

    Return None for a mesh of more than two dims, which ``fully_shard`` does not take.
    """
    if mesh.ndim > 2:
        return None
    model = _model().to(device)
    _shard(model, mesh)
    batch, taken = torch.ones(4, _DIM, device=device), []
    for _ in range(_WARM_UP + _STEPS):
        settle(device)
        before_s = time.perf_counter()
        model(batch).sum().backward()
        settle(device)
        taken.append(time.perf_counter() - before_s)
        model.zero_grad()
    return statistics.median(taken[_WARM_UP:])


def with_action_s(hardware: Hardware, shape: Mapping[str, int], step_s: float) -> Hardware:
    """Return ``hardware`` with the host's time for an action that explains a measured step."""
    found = plan(
        _model(),
        batch=torch.ones(4, _DIM),
        mesh=shape,
        hardware=hardware,
        shard=_shard,
        loss=lambda model, batch: model(batch).sum(),
        optimizer=_Nothing,
    )
    left_s = (step_s - found.step_s) / len(found.actions)
    return replace(hardware, action_s=max(left_s, 0.0))


class _Nothing:
    """An optimizer that steps nothing."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self._params = list(params)
        self.state: dict[object, object] = {}

    def step(self) -> None:
        """Do nothing."""

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for param in self._params:
            param.grad = None
