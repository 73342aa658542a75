"""The choice of optimizer state that stays on the host between steps, and memory for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fullshard.device import host_tensor
from fullshard.errors import ArgumentTypeError, ConfigError, UnsupportedError
from fullshard.optim.inner import Groups
from fullshard.tensors import flat_part_of, local_part

FRACTION = "host_fraction"


def checked_fraction(fraction: Any, label: str) -> float:
    """Return ``fraction`` as a float.

    Raises:
        ArgumentTypeError: it is not a number.
        ConfigError: it is not in 0 to 1.
    """
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
        raise ArgumentTypeError(
            f"{label}: {FRACTION}={fraction!r}, expected a number in 0 to 1: the share of state "
            "that lives in host memory"
        )
    if not 0 <= fraction <= 1:
        raise ConfigError(
            f"{label}: {FRACTION}={fraction!r}, expected a number in 0 (all state on the device) "
            "to 1 (all in host memory)"
        )
    return float(fraction)


def refuse_fraction(options: Any, label: str) -> None:
    """Refuse options of an optimizer that cannot have its state in host memory.

    Raises:
        UnsupportedError: ``options`` have a fraction.
    """
    if FRACTION in options:
        raise UnsupportedError(
            f"{label}: {FRACTION}={options[FRACTION]!r}, but only ShardedOptimizer has state in "
            "host memory; leave it out, or shard with offload_policy=CPUOffloadPolicy()"
        )


def fewest(sizes: Sequence[int], fraction: float) -> list[int]:
    """Return indices of ``sizes`` that add up to at least ``fraction`` of all, none needlessly.

    Small ones are preferred, since what is streamed needs room on the device.
    """
    need = fraction * sum(sizes)
    chosen: list[int] = []
    total = 0
    for at in sorted(range(len(sizes)), key=lambda at: (sizes[at], at)):
        if total < need:
            chosen.append(at)
            total += sizes[at]
    for at in tuple(chosen):
        if total - sizes[at] >= need:
            chosen.remove(at)
            total -= sizes[at]
    return sorted(chosen)


def hosted(groups: Groups, fractions: Sequence[float]) -> set[int]:
    """Return the ``id`` of each parameter whose state lives in host memory.

    Parameters of a group in one buffer, its part of a unit, stay together. Sizes are those on this
    rank. Ranks with equal shards choose alike, but no result depends on the choice.
    """
    chosen: set[int] = set()
    for group, fraction in zip(groups, fractions, strict=False):
        if fraction:
            blocks = list(_blocks(group["params"]))
            sizes = [sum(local_part(one).nbytes for one in block) for block in blocks]
            chosen |= {id(one) for at in fewest(sizes, fraction) for one in blocks[at]}
    return chosen


def _blocks(params: Sequence[Tensor]) -> list[list[Tensor]]:
    blocks: dict[int, list[Tensor]] = {}
    for param in params:
        local = local_part(param)
        part = flat_part_of(local)
        if local.numel() and not local.is_meta:
            blocks.setdefault(id(param if part is None else part.flat), []).append(param)
    return list(blocks.values())


def host_like(like: Tensor, device: torch.device) -> Tensor:
    """Return memory of the host, shaped and strided like ``like``, for copies to ``device``."""
    flat = host_tensor(like.numel(), like.dtype, pinned=device.type != "cpu")
    return flat.as_strided(like.shape, torch.empty_like(like, device="meta").stride())
