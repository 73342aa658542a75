"""Times of fullshard's own collectives along one mesh dim."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from fullshard.comm import Collectives, Pending
from fullshard.doctor.speed import median_s

CPU_SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 25)
GPU_SIZES = (*CPU_SIZES, 1 << 28)
"""Sizes to measure: bytes of the unsharded tensor, that is of all ranks of a group together."""

_REPETITIONS = 7
_LONGEST_S = 0.25  # larger sizes are skipped once a collective took longer
_WHAT = ("all_gather", "reduce_scatter", "all_reduce")


class Timing(NamedTuple):
    """The median time of one collective at one size."""

    what: str
    """"all_gather", "reduce_scatter" or "all_reduce"."""
    nbytes: int
    """Bytes of the unsharded tensor."""
    seconds: float

    def bandwidth(self, world: int) -> float:
        """Return the bytes per second that a rank of ``world`` receives ("busbw" of nccl-tests)."""
        return received(self.what, self.nbytes, world) / self.seconds


def received(what: str, nbytes: int, world: int) -> float:
    """Return the bytes that each of ``world`` ranks receives at least."""
    passes = 2 if what == "all_reduce" else 1
    return passes * nbytes * (world - 1) / world


def time_wire(
    wire: Collectives, device: torch.device, *, sizes: Sequence[int] = ()
) -> list[Timing]:
    """Return this rank's median times along one mesh dim; all groups of the dim measure at once.

    All ranks of the dim must call this together. On a slow wire the largest sizes are skipped.

    Args:
        wire: the collectives of this rank's group.
        device: the device of the tensors.
        sizes: bytes of the unsharded tensors; by default ``CPU_SIZES`` or ``GPU_SIZES``.
    """
    found: list[Timing] = []
    for nbytes in sizes or (CPU_SIZES if device.type == "cpu" else GPU_SIZES):
        here = [_timed(wire, device, what, nbytes) for what in _WHAT]
        found += here
        longest = torch.tensor([max(one.seconds for one in here)], device=device)
        wire.all_reduce_mean(longest).wait()  # so that all ranks stop at the same size
        if longest.item() > _LONGEST_S:
            break
    return found


def _timed(wire: Collectives, device: torch.device, what: str, nbytes: int) -> Timing:
    """Time one collective over about ``nbytes``; the result has the exact number."""
    part = torch.ones(max(1, nbytes // 4 // wire.world), device=device)
    unsharded = part.repeat(wire.world)
    one = torch.zeros(1, device=device)
    start: Callable[[], Pending] = {
        "all_gather": lambda: wire.all_gather([unsharded], [part]),
        "reduce_scatter": lambda: wire.reduce_scatter_mean(part, unsharded),
        "all_reduce": lambda: wire.all_reduce_mean(unsharded),
    }[what]
    taken_s = median_s(
        lambda: start().wait(),
        device,
        repetitions=_REPETITIONS,
        prepare=lambda: wire.all_reduce_mean(one).wait(),  # so that all ranks start together
    )
    return Timing(what, unsharded.nbytes, taken_s)


def median_timings(of_ranks: Iterable[Sequence[Timing]]) -> list[Timing]:
    """Return the median over ranks of each collective and size."""
    seconds: dict[tuple[str, int], list[float]] = {}
    for timings in of_ranks:
        for one in timings:
            seconds.setdefault((one.what, one.nbytes), []).append(one.seconds)
    return [Timing(*key, statistics.median(taken)) for key, taken in seconds.items()]
