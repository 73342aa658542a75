"""Describe the hardware from measurements, for ``fullshard doctor --calibrate``.

The doctor measures collectives, matrix products and memory. ``time_host`` adds figures that only a
plan needs: the host's time for small operations, and for actions of the engine.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard._torch import autograd as _autograd
from fullshard.device import DryLanes, LaneSpan
from fullshard.doctor.facts import by_host
from fullshard.doctor.links import Timing, received
from fullshard.doctor.report import Report
from fullshard.doctor.speed import Speed, median_s
from fullshard.doctor.wires import SHARED_MEMORY
from fullshard.errors import ConfigError
from fullshard.frontend import fully_shard
from fullshard.plan.dry_run import on_meta
from fullshard.plan.hardware import CPU, PRESETS, Hardware, Link
from fullshard.plan.ledger import PlanLedger
from fullshard.plan.planning import plan

_UNITS, _DIM, _BATCH = 12, 16, 4
_PRESET = "; bandwidths of the host, granule, fixed and communicator bytes are those of a preset"


def hardware_from(report: Report, date: str) -> Hardware:
    """Return the measured hardware of a report whose ranks called ``time_host``.

    Rates are medians over ranks, memory is the smallest. A link has one latency and one bandwidth,
    fitted to all-gathers and reduce-scatters together. The outermost link connects any number of
    ranks.

    Raises:
        ConfigError: the report has failures, or no rank called ``time_host``.
    """
    op_s = [speed.op_s for speed in report.speeds if speed.op_s is not None]
    if report.failures or not op_s:
        raise ConfigError("nothing is written for --calibrate: not everything could be measured")
    ranks, hosts = report.ranks, by_host(report.ranks).values()
    host_nbytes = min(here[0].host.usable_nbytes // len(here) for here in hosts)
    gpu = None if report.device == "cpu" else ranks[0].gpu
    preset = CPU if gpu is None else PRESETS["h100"]
    shares = any(SHARED_MEMORY in name for dim in report.dims for name in dim.carriers())
    hardware = replace(
        preset,
        name=f"cpu, {ranks[0].num_threads} thread(s) a rank" if gpu is None else gpu.name,
        memory_nbytes=host_nbytes if gpu is None else _memory_nbytes(report),
        host=preset.host and replace(preset.host, memory_nbytes=host_nbytes),
        flops={
            dtype: statistics.median(speed.flops[dtype] for speed in report.speeds)
            for dtype in report.speeds[0].flops
        },
        memory_bandwidth=statistics.median(speed.memory_bandwidth for speed in report.speeds),
        op_s=statistics.median(op_s),
        links=_links(report),
        device=report.device,
        in_background=gpu is not None or not shares,  # shared memory is copied by waiting ranks
        adds_wide=all(group.wire.adds_wide for dim in report.dims for group in dim.groups),
        source=f"measured on {date} by fullshard doctor, torch {ranks[0].versions['torch']}; "
        f"{len(ranks)} rank(s) on {len(hosts)} host(s){'' if gpu is None else _PRESET}",
    )
    steps = [speed.tiny_step_s for speed in report.speeds if speed.tiny_step_s is not None]
    return _with_action_s(hardware, report.shape, statistics.median(steps)) if steps else hardware


def _memory_nbytes(report: Report) -> int:
    return min(one.gpu.memory_nbytes for one in report.ranks if one.gpu is not None)


def _links(report: Report) -> tuple[Link, ...]:
    """Return a link for each dim of more than one rank, innermost first; the last has no reach."""
    links, near = [], 1
    for dim in reversed(report.dims):
        near *= dim.size
        if dim.size > 1:
            reach = None if near == len(report.ranks) else near
            links.append(replace(link_of(dim.timings, dim.size), reach=reach))
    return tuple(links)


def link_of(timings: Iterable[Timing], world: int) -> Link:
    """Return latency per step and bandwidth, as ``Hardware.exchange_s`` counts them.

    All-gathers and reduce-scatters count alike, because a ``Link`` does not distinguish them.
    """
    points = [
        (received(one.what, one.nbytes, world), one.seconds)
        for one in timings
        if one.what != "all_reduce"
    ]
    line = fitted(points)
    return replace(line, latency_s=line.latency_s / (world - 1))


def fitted(points: Iterable[tuple[float, float]]) -> Link:
    """Return the line ``latency_s + nbytes / bandwidth`` through points (bytes, seconds).

    The fit minimises the squares of relative errors; absolute errors would leave the latency to the
    noise of the largest size. A latency below zero is replaced by zero, and the line fitted again.

    Raises:
        ConfigError: there are fewer than two sizes, which determine no line.
    """
    points = list(points)
    if len({x for x, _ in points}) < 2:
        raise ConfigError("latency and bandwidth can only be told from times of two sizes or more")
    rows = [(1 / y, x / y) for x, y in points]  # the factors of latency and of 1 / bandwidth
    a, b, c = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    d, e = (sum(row[i] for row in rows) for i in (0, 1))
    slope = (a * e - b * d) / (a * c - b * b)
    latency_s = (d - b * slope) / a
    if latency_s < 0:
        return Link(None, c / e, 0.0)
    nbytes, seconds = max(points)
    return Link(None, 1 / slope if slope > 0 else nbytes / seconds, latency_s)


# Time of the host


def time_host(speed: Speed, mesh: DeviceMesh, device: torch.device) -> Speed:
    """Return ``speed`` with this rank's ``op_s`` and ``tiny_step_s``; a collective over ``mesh``.

    ``tiny_step_s`` is left out on a mesh of more than two dims, which ``fully_shard`` refuses.
    """
    step_s = _tiny_step_s(mesh, device) if mesh.ndim <= 2 else None
    return speed._replace(op_s=_op_s(device), tiny_step_s=step_s)


def _op_s(device: torch.device) -> float:
    """Return the host's seconds per operation of small layers; the host never waits for a GPU."""
    layers = [(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)) for _ in range(4)]
    model = nn.Sequential(*(layer for block in layers for layer in block)).to(device)
    batch = torch.ones(_BATCH, 16, device=device)
    step_s = median_s(_step(model, batch), device, repetitions=30, waits=False)
    return step_s / count_operations(model, batch)


def count_operations(model: nn.Module, batch: Tensor) -> int:
    """Return the number of operations in forward and backward that take host time in a plan."""
    spans: list[LaneSpan] = []
    lanes = DryLanes(duration_s=lambda exchange: 0.0, note=spans.append)
    hardware = Hardware("infinitely fast", 0, {"float32": math.inf}, math.inf)
    with PlanLedger(hardware, lanes):
        _step(on_meta(model), batch.to("meta"))()
    return len(spans)


def _step(model: nn.Module, batch: Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad()
        _autograd.run_backward(model(batch).sum())

    return step


def _tiny_model() -> nn.Sequential:
    """Return a model whose steps take the time of the engine, as its units compute so little."""
    return nn.Sequential(*(nn.Linear(_DIM, _DIM) for _ in range(_UNITS)))


def _shard(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _tiny_step_s(mesh: DeviceMesh, device: torch.device) -> float:
    model = _tiny_model().to(device)
    _shard(model, mesh)
    batch = torch.ones(_BATCH, _DIM, device=device)
    return median_s(
        lambda: model(batch).sum().backward(),
        device,
        repetitions=15,
        warm_up=3,
        prepare=model.zero_grad,
    )


def _with_action_s(hardware: Hardware, shape: Mapping[str, int], step_s: float) -> Hardware:
    """Return ``hardware`` with the ``action_s`` by which a plan of a tiny step takes ``step_s``."""
    planned = plan(
        _tiny_model(),
        batch=torch.ones(_BATCH, _DIM),
        mesh=shape,
        hardware=hardware,
        shard=_shard,
        loss=lambda model, batch: model(batch).sum(),
        optimizer=_no_optimizer,
    )
    return replace(hardware, action_s=max((step_s - planned.step_s) / len(planned.actions), 0.0))


def _no_optimizer(params: Iterable[nn.Parameter]) -> Any:
    """Return an optimizer that frees the gradients, and steps nothing."""
    zero_grad = nn.ParameterList(params).zero_grad
    return SimpleNamespace(state={}, step=lambda: None, zero_grad=zero_grad)
