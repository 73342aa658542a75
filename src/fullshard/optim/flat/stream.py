"""Optimizer state that stays on the host between steps, and its way to the device and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fullshard.device import Lane, LaneEvent, Lanes, make_lanes
from fullshard.optim.flat.run import Run
from fullshard.optim.host import host_like
from fullshard.optim.inner import Groups, Inner

_NUM_FETCHED = 2  # host runs with a copy of their state on the device: this one and the next


class Stream:
    """The turns of a step: first the runs with state on the device, then each other run alone.

    The state of the other runs moves to the device and back on lanes of this object.
    """

    def __init__(self, inner: Inner) -> None:
        self._inner = inner
        self._lanes: dict[torch.device, Lanes] = {}
        self._back: dict[torch.device, LaneEvent] = {}  # recorded after the last copy to the host
        self._fetched: dict[Run, tuple[dict[str, Tensor], LaneEvent]] = {}
        self._staying: list[Run] = []
        self._hosted: list[Run] = []

    def set_runs(self, groups: Groups, runs: Sequence[Run]) -> None:
        """Set the runs that the next steps update."""
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
        """Drop state that was fetched for turns that did not run."""
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
        """Start to copy a run's new state to the host; return the host tensors, with new entries.

        Args:
            run: the run that stepped.
            now: state after the step; a tensor that the optimizer replaced is first copied to
                ``here``.
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
