"""The visit of the doctor: the steps that all ranks of a job take to examine it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.comm import collectives_of
from fullshard.doctor.exchange import KeyValueExchange, bounded, gather_facts
from fullshard.doctor.facts import Facts, facts_here
from fullshard.doctor.links import Timing, median_timings, time_wire
from fullshard.doctor.report import Dim, GroupTimings, Report
from fullshard.doctor.speed import Speed, speed_here
from fullshard.doctor.wires import Wire, default_shape, wire_of
from fullshard.progress import Operation

Calibrate = Callable[[Speed, DeviceMesh, torch.device], Speed]
"""Adds measurements to the speed of this rank; all ranks of the mesh call it at the same time."""


def examine(
    meet: Callable[[], dist.Store],
    show: Callable[[Report], None],
    *,
    rank: int,
    world: int,
    shape: Mapping[str, int] | None = None,
    timeout_s: float = 60.0,
    calibrate: Calibrate | None = None,
) -> int:
    """Examine a job as one of its ranks, and return the exit code of this process.

    Each step has a time limit. If a step fails or exceeds it, rank 0 shows the results so far.
    So if ranks cannot form a process group, the findings from their facts are still reported.

    Args:
        meet: returns the store of the job as soon as the other ranks are connected.
        show: prints or saves the report; called once, on rank 0.
        rank: the number of this process.
        world: the number of processes.
        shape: sizes of the mesh by name of dim; None: see ``wires.default_shape``.
        timeout_s: seconds that a rank waits for the others in each step.
        calibrate: adds measurements to the speed of each rank, as ``plan.time_host`` does; None:
            only ``speed.speed_here`` measures ranks.
    """
    report = Report([facts_here(rank)], world)

    def give_up(message: str) -> None:
        report.failures.append(message)
        if rank == 0:
            show(report)
        else:
            print(f"fullshard: error: rank {rank}: {message}", file=sys.stderr, flush=True)

    with bounded(2 * timeout_s, "the rendezvous at MASTER_ADDR", then=give_up):
        try:
            store = meet()
        except Exception as error:  # of any type: rank 0 shows what it knows
            give_up(f"the rendezvous at MASTER_ADDR: {type(error).__name__}: {error}")
            return 1
    exchange = KeyValueExchange(store, rank=rank, world=world, timeout_s=timeout_s)
    failure = ""
    try:
        with bounded(6 * timeout_s, "the measurement", then=give_up):
            _look(report, exchange, store, shape, calibrate)
    except Exception as error:  # of any type: the other ranks must learn of it
        failure = f"rank {rank}: {type(error).__name__}: {error}"
    with bounded(6 * timeout_s, "the end of all ranks", then=give_up):
        return _end(report, exchange, failure, show)


def _look(
    report: Report,
    exchange: KeyValueExchange,
    store: dist.Store,
    shape: Mapping[str, int] | None,
    calibrate: Calibrate | None,
) -> None:
    """Measure the job with the other ranks, and complete the report on rank 0."""
    own = report.ranks[0]
    ranks = gather_facts(exchange, own)
    if ranks:
        report.ranks = ranks
    chosen = exchange.from_first(
        "mesh", [_device_type(ranks), shape or default_shape(ranks)] if ranks else None
    )
    report.device, report.shape = chosen
    device = _join(report.device, exchange, store, own.local_rank)
    mesh = init_device_mesh(
        report.device, tuple(report.shape.values()), mesh_dim_names=tuple(report.shape)
    )
    report.dims, report.speeds = measure(mesh, device, exchange, calibrate=calibrate)


def _device_type(ranks: Sequence[Facts]) -> str:
    """Return "cuda" if each rank has its own GPU and NCCL, else "cpu"."""
    used = {(one.host.key, one.gpu.uuid) for one in ranks if one.gpu is not None}
    has_nccl = all("nccl" in one.backends for one in ranks)
    return "cuda" if len(used) == len(ranks) and has_nccl else "cpu"


def _join(
    device_type: str, exchange: KeyValueExchange, store: dist.Store, local_rank: int
) -> torch.device:
    """Make the default process group, and return the device of this rank."""
    place: dict[str, Any] = {"store": store, "rank": exchange.rank, "world_size": exchange.world}
    if device_type == "cpu":
        timeout = timedelta(seconds=exchange.timeout_s)
        dist.init_process_group("gloo", timeout=timeout, **place)
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    # NCCL ends the process at this time-out. The limit of ``bounded`` is shorter, so that the
    # report is shown before.
    timeout = timedelta(seconds=12 * exchange.timeout_s)
    dist.init_process_group("nccl", timeout=timeout, device_id=device, **place)
    return device


def measure(
    mesh: DeviceMesh,
    device: torch.device,
    exchange: KeyValueExchange,
    *,
    sizes: Sequence[int] = (),
    calibrate: Calibrate | None = None,
) -> tuple[list[Dim], list[Speed]]:
    """Measure each dim of ``mesh`` and each rank; return the results on rank 0, else empty lists.

    All ranks call this together. All groups of a dim, and then all ranks, measure at the same time,
    because they also work at the same time in a training step.

    Args:
        mesh: the mesh to measure.
        device: the device of this rank.
        exchange: of values among the ranks.
        sizes: see ``links.time_wire``.
        calibrate: see ``examine``.
    """
    wires, timings = [], []
    work = Operation("measuring", mesh.ndim + 2, "steps")
    for dim in range(mesh.ndim):
        wire = collectives_of(mesh, dim)
        exchange.barrier(f"dim {dim}")
        wires.append(wire_of(mesh, dim, wire))
        timings.append([] if wire.world == 1 else time_wire(wire, device, sizes=sizes))
        work.add(1)
    exchange.barrier("speed")
    speed = speed_here(device)
    work.add(1)
    exchange.barrier("steps")
    if calibrate is not None:
        speed = calibrate(speed, mesh, device)
    work.add(1)
    told = exchange.gather("measured", [wires, timings, speed])
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    dims = [
        Dim(name, mesh.size(dim), _groups([(each[0][dim], each[1][dim]) for each in told]))
        for dim, name in enumerate(names)
        if told
    ]
    return dims, [Speed(*each[2]) for each in told]


def _groups(told: Sequence[tuple[Any, Any]]) -> list[GroupTimings]:
    """Return the groups of a dim, from the wire and the timings that each rank reported."""
    timings: dict[Wire, list[list[Timing]]] = {}
    for wire, taken in told:
        key = Wire(tuple(wire[0]), *wire[1:])
        timings.setdefault(key, []).append([Timing(*one) for one in taken])
    return [GroupTimings(wire, median_timings(of_ranks)) for wire, of_ranks in timings.items()]


def _end(
    report: Report, exchange: KeyValueExchange, failure: str, show: Callable[[Report], None]
) -> int:
    """Collect failures, let rank 0 show the report, and return the exit code when it is shown."""
    try:
        report.failures += [each for each in exchange.gather("end", failure) if each]
    except Exception as error:
        report.failures += [each for each in (failure, str(error)) if each]
    try:
        if exchange.rank == 0:
            show(report)
    finally:
        exchange.from_first("shown")
    if not report.failures:
        exchange.gather("left", None)  # rank 0 may hold the store, and leaves last
    return report.exitcode if exchange.rank == 0 else int(bool(failure))
