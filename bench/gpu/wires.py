"""The backend's own collectives, called as fullshard calls them, on a group of one rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from bench.gpu.machine import Failed, Kernel, Machine, Verdict
from fullshard._torch import collectives as _collectives
from fullshard.comm.native import Native
from fullshard.device.streams import OnStream

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NUMEL = 1 << 16


def collectives(machine: Machine) -> Verdict:
    """Results in place, coalesced, and of a mean in each dtype, by our wrappers."""
    figures = {}
    with machine.alone() as group:
        native = Native(
            machine.device.type, averages=_collectives.has_average(group, machine.device.type)
        )
        for dtype in DTYPES:
            values = torch.arange(NUMEL, device=machine.device).remainder(97).to(dtype)
            for averages in {machine.is_real, False}:
                figures[f"{dtype}, averages={averages}"] = _rounds(machine, group, values, averages)
        raw = torch.arange(64, dtype=torch.uint8, device=machine.device)
        heard = torch.zeros_like(raw)
        native.all_gather(group, [heard], [raw], "").wait()
        machine.synchronize()
        if not torch.equal(heard, raw):
            raise Failed("bytes were not gathered")
    return Verdict(passed=True, figures=figures)


def _rounds(
    machine: Machine, group: dist.ProcessGroup, values: torch.Tensor, averages: bool
) -> str:
    native = Native(machine.device.type, averages=averages)
    in_place, apart = values.clone(), torch.full_like(values, torch.nan)
    native.all_gather(group, [in_place], [in_place], "").wait()
    native.all_gather(group, [in_place, apart], [in_place, values], "").wait()
    reduced, wide = torch.full_like(values, torch.nan), values.double()
    native.reduce_scatter_mean(group, reduced, values.clone(), "").wait()
    native.reduce_scatter_mean(group, wide, values.clone(), "").wait()
    everywhere = values.clone()
    native.all_reduce_mean(group, everywhere, "").wait()
    machine.synchronize()
    for name, found in {
        "gathered in place": in_place,
        "gathered together": apart,
        "reduced": reduced,
        "reduced to another dtype": wide.to(values.dtype),
        "reduced over all": everywhere,
    }.items():
        if not torch.equal(found, values):
            raise Failed(f"{values.dtype}, averages={averages}: {name} is wrong")
    return "as sent"


def streams(machine: Machine) -> Verdict:
    """On which stream a collective runs: that which is current, of a high priority.

    Control: asked otherwise, the backend takes a stream of its own.
    """
    with machine.alone() as group:
        source = torch.ones(NUMEL, device=machine.device)
        output = torch.empty_like(source)
        mine = machine.accelerator.Stream(device=machine.device, priority=-1)

        def run(*, in_order: bool) -> None:
            with machine.accelerator.stream(mine):
                source.fill_(2)
                work = _collectives.all_gather(group, [output], [source], in_order=in_order)
                output.add_(1)
            if work is not None:
                work.wait()

        for in_order in (True, False):
            run(in_order=in_order)  # what happens once
        ordered = machine.traced(lambda: run(in_order=True))
        beside = machine.traced(lambda: run(in_order=False))
        wire = OnStream(_Raw(group), machine.accelerator, machine.device, mine)  # type: ignore[arg-type]
        wired = machine.traced(lambda: wire.all_gather([output], [source]).wait())
    figures = {
        "streams, in order": len(_streams(ordered)),
        "streams, not in order": len(_streams(beside)),
        "streams, by a wire": len(_streams(wired)),
    }
    if not machine.is_real:
        return Verdict(passed=True, figures=figures)
    if len(_streams(ordered)) != 1:
        raise Failed(f"in order, but on streams {_streams(ordered)}: {ordered}")
    if len(_streams(beside)) != 2:
        return Verdict(
            passed=None,
            figures=figures,
            notes=["a group of one runs no kernel of its own here: the control shows nothing"],
        )
    return Verdict(passed=True, figures=figures)


class _Raw:
    """Just the gather of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._native = Native("cuda", averages=False)

    def all_gather(self, outputs: list[torch.Tensor], sources: list[torch.Tensor]) -> object:
        return self._native.all_gather(self._group, outputs, sources, "")


def _streams(kernels: list[Kernel]) -> set[int]:
    return {kernel.stream for kernel in kernels}
