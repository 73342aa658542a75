"""Optimizer state that stays on the host between steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fullshard.device import Lane, LaneEvent, Lanes, host_tensor, make_lanes
from fullshard.errors import ArgumentTypeError, ConfigError, UnsupportedError
from fullshard.optim.inner import Groups, Inner
from fullshard.tensors import flat_part_of, local_part

if TYPE_CHECKING:
    from fullshard.optim.flat.run import Run

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


_NUM_FETCHED = 2  # runs whose state is on the device


def host_like(like: Tensor, device: torch.device) -> Tensor:
    """Return memory of the host, shaped and strided like ``like``, for copies to ``device``."""
    flat = host_tensor(like.numel(), like.dtype, pinned=device.type != "cpu")
    return flat.as_strided(like.shape, torch.empty_like(like, device="meta").stride())


class Stream:
    """The turns of a step: first the runs with state on the device, then each other run alone.

    State of the others is copied between the host and their device on lanes of our own.
    """

    def __init__(self, inner: Inner) -> None:
        self._inner = inner
        self._lanes: dict[torch.device, Lanes] = {}
        self._back: dict[torch.device, LaneEvent] = {}  # behind the last copy to the host
        self._fetched: dict[Run, tuple[dict[str, Tensor], LaneEvent]] = {}
        self._staying: list[Run] = []
        self._hosted: list[Run] = []

    def set_runs(self, groups: Groups, runs: Sequence[Run]) -> None:
        """Set what the next steps step."""
        self._inner.set_runs(groups, runs)
        self._staying = [run for run in runs if not run.on_host]
        self._hosted = [run for run in runs if run.on_host]

    def to_host(self, run: Run, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``values``, state of ``run`` on its device, with cut state on the host."""
        cut = run.cut(values, self._inner.scalars)
        return {**values, **{key: _on_host(one, run.device) for key, one in cut.items()}}

    def turns(self, groups: Groups) -> Iterator[AbstractContextManager[None]]:
        """Yield contexts, in each of which the inner optimizer steps once."""
        runs = self._hosted
        self._fetch(runs[:_NUM_FETCHED])
        if self._staying or not runs:
            if runs:
                self._inner.set_runs(groups, self._staying)
            yield nullcontext()
        for at, run in enumerate(runs):
            self._fetch(runs[at : at + _NUM_FETCHED])
            yield self._turn(groups, run)

    def wait(self) -> None:
        """Block the host until all state of the host is there."""
        for event in self._back.values():
            event.synchronize()
        self._back.clear()

    def leave(self) -> None:
        """Drop what was fetched for turns that did not come."""
        self._fetched.clear()

    def _lanes_of(self, run: Run) -> Lanes:
        if run.device not in self._lanes:
            self._lanes[run.device] = make_lanes(run.device)
        return self._lanes[run.device]

    def _fetch(self, runs: Sequence[Run]) -> None:
        """Begin to copy the state of ``runs`` to the device, unless begun already."""
        for run in runs:
            if run in self._fetched:
                continue
            lanes = self._lanes_of(run)
            # Copies to the host must end before their results are read and before memory is used
            # again.
            lanes.join(Lane.HOST_TO_DEVICE, Lane.DEVICE_TO_HOST)
            with lanes.on(Lane.HOST_TO_DEVICE):
                here = {
                    key: torch.empty_strided(
                        one.shape, one.stride(), dtype=one.dtype, device=run.device
                    ).copy_(one, non_blocking=True)
                    for key, one in self._host_state(run).items()
                }
                self._fetched[run] = here, lanes.mark()

    def _host_state(self, run: Run) -> dict[str, Tensor]:
        return run.cut(self._inner.state_of(run) or {}, self._inner.scalars)

    @contextmanager
    def _turn(self, groups: Groups, run: Run) -> Iterator[None]:
        """Step ``run`` alone, with its state on the device."""
        lanes, host_state = self._lanes_of(run), self._host_state(run)
        here, arrived = self._fetched.pop(run)
        lanes.untrack_streams()
        lanes.wait_event(Lane.COMPUTE, arrived)
        self._inner.set_runs(groups, [run])
        if here:
            self._inner.state_of(run).update(here)  # type: ignore[union-attr]
        try:
            yield
        finally:  # a step that raises leaves what it has done
            values = self._inner.state_of(run)
            if values is not None:
                now = run.cut(values, self._inner.scalars)
                values.update(self._return_to_host(run, now, here, host_state))

    def _return_to_host(
        self, run: Run, now: dict[str, Tensor], here: dict[str, Tensor], host_state: Any
    ) -> Any:
        """Begin to copy stepped state to the host; return the state there, with new entries.

        Args:
            run: whose state it is.
            now: state after the step; tensors in other memory than before are copied once more.
            here: state before the step, on the device; callers may not use it any longer.
            host_state: memory of ``here`` on the host.
        """
        lanes = self._lanes_of(run)
        fresh = {key: one for key, one in now.items() if not _is_alike(one, host_state.get(key))}
        kept = {key: host_state[key] for key in now if key not in fresh}
        for key in kept:
            if now[key] is not here[key]:
                here[key].copy_(now[key])
        lanes.join(Lane.DEVICE_TO_HOST, Lane.COMPUTE)
        with lanes.on(Lane.DEVICE_TO_HOST):
            for key, one in kept.items():
                one.copy_(here[key], non_blocking=True)
            self._back[run.device] = lanes.mark()
        return kept | {key: _on_host(one, run.device) for key, one in fresh.items()}


def _on_host(value: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the host, after the writes of the current lane; block the host."""
    return host_like(value, device).copy_(value)


def _is_alike(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and (one.shape, one.dtype) == (other.shape, other.dtype)
