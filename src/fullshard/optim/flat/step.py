"""The stepper, which updates the parameters of an optimizer run by run."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.errors import UnsupportedError
from fullshard.optim.flat.plan import Candidate, StepPlan, align, gradients, plan_runs
from fullshard.optim.flat.run import Run
from fullshard.optim.flat.scalars import check_state, state_keys_of
from fullshard.optim.host import Stream, hosted
from fullshard.optim.inner import Groups, Inner, label_of, numbered
from fullshard.tensors import local_part

State = MutableMapping[Tensor, dict[str, Any]]


class Stepper:
    """The driver of a ``ShardedOptimizer``: finds runs, binds memory, steps, shows state.

    While parameters, gradients and state stay in the same memory, a step checks parameters only in
    passes over lists. Otherwise the runs are recomputed; parameters that change from one run to
    another keep their state.
    """

    def __init__(self, inner: Inner, fractions: Sequence[float]) -> None:
        """Create a stepper; ``fractions``: by group, the share of state that is on the host."""
        self._inner = inner
        self._fractions = fractions
        self._stream = Stream(inner)
        self._plan: StepPlan | None = None
        self._run_of: dict[Tensor, Run] = {}  # the run that holds each parameter's state

    @property
    def num_runs(self) -> int:
        """Number of runs, each one tensor, in the last step."""
        return len(self._plan.runs) if self._plan else 0

    def wait(self) -> None:
        """Block the host until state in its memory is that of the last step."""
        self._stream.wait()

    def prepare(self, groups: Groups, state: State, *, loaded: bool) -> None:
        """Adopt state that was ``loaded``, or create what the class creates at construction.

        Parameters on the meta device are skipped until later.
        """
        if loaded or self._inner.is_eager:
            chosen = [(n, p) for n, p in numbered(groups) if (p in state) == loaded]
            chosen = [(n, p) for n, p in chosen if not local_part(p).is_meta]
            self._find_runs(groups, chosen, [None] * len(chosen), state)

    def plan(self, groups: Groups, state: State) -> StepPlan:
        """Return the runs of all parameters that have gradients, with memory bound to them.

        Args:
            groups: the user's ``param_groups``.
            state: the user's ``state``.

        Raises:
            ConfigError, UnsupportedError: some state, or some parameter, cannot be stepped.
        """
        params = list(chain.from_iterable(map(itemgetter("params"), groups)))
        grads = gradients(params)
        plan = self._plan
        if (
            plan
            and plan.is_valid(groups, params, grads)
            and all(run.is_untouched(state) for run in plan.runs)
            and _bind(plan, grads)
        ):
            return plan
        self._plan = None
        return self._new_plan(groups, grads, state)

    def step(
        self,
        plan: StepPlan,
        groups: Groups,
        state: State,
        amp: Mapping[str, Tensor],
        *,
        was_loaded: bool,
    ) -> None:
        """Step the runs of ``plan``, and release their memory.

        Args:
            plan: what ``plan`` has returned.
            groups: the user's ``param_groups``.
            state: the user's ``state``; it shows the state of the runs afterwards.
            amp: see ``Inner.step``.
            was_loaded: True if an older version of the class may have made the state.
        """
        try:
            if was_loaded:
                self._inner.read_again()
            self._inner.step(groups, amp, self._stream.turns(groups))
            self._show(plan.runs, groups, state)
        finally:
            self._stream.leave()
            for run in plan.runs:
                run.release()
        self._plan = plan
        torch.autograd.graph.increment_version(plan.exposed)

    def _new_plan(self, groups: Groups, grads: list[Tensor | None], state: State) -> StepPlan:
        """Return a plan for these gradients, with memory bound to its runs."""
        align([param for _, param in numbered(groups)], grads)
        pairs = zip(numbered(groups), grads, strict=True)
        chosen = [(member, grad) for member, grad in pairs if grad is not None]
        members, its_grads = [member for member, _ in chosen], [grad for _, grad in chosen]
        runs, candidates = self._find_runs(groups, members, its_grads, state)
        group_of = {id(param): number for (number, param), _ in chosen}
        by_group: list[list[Run]] = [[] for _ in groups]
        for run in runs:
            by_group[group_of[id(run.params[0])]].append(run)
        self._stream.set_runs(groups, by_group)
        plan = StepPlan(groups, grads, runs, candidates)
        found = _bind(plan, grads)
        assert found, "a run that was just found lies nowhere"
        return plan

    def _find_runs(
        self,
        groups: Groups,
        members: Sequence[tuple[int, Tensor]],
        grads: Sequence[Tensor | None],
        state: State,
    ) -> tuple[list[Run], list[Candidate]]:
        """Return the runs of these parameters, with their state in place, and their facts."""
        self.wait()
        params = [param for _, param in members]
        for param in params:
            _check_class(groups, param)
            check_state(groups, param, state.get(param, {}), self._inner.scalars)
        state_keys = state_keys_of(params, state, self._inner.scalars)
        facts = zip(members, grads, state_keys, self._places(groups, params), strict=True)
        candidates = [Candidate.of(p, grad, group, key, at) for (group, p), grad, key, at in facts]
        runs = [self._known(run, state) or run for run in plan_runs(candidates)]
        new = [run for run in runs if run is not self._run_of.get(run.params[0])]
        self._settle(new, groups, state)
        return runs, candidates

    def _places(self, groups: Groups, params: Sequence[Tensor]) -> list[bool | None]:
        """Return for each parameter whether its state is on the host; None: wherever it is."""
        if not any(self._fractions):
            return [None] * len(params)
        chosen = hosted(groups, self._fractions)
        return [id(param) in chosen for param in params]

    def _known(self, run: Run, state: State) -> Run | None:
        """Return the existing run equal to ``run`` if the state that users see is still its own."""
        old = self._run_of.get(run.params[0])
        return old if old and old.is_like(run) and old.is_untouched(state) else None

    def _settle(self, new: Sequence[Run], groups: Groups, state: State) -> None:
        """Give the runs in ``new`` the state of their parameters."""
        flats: dict[bool | None, set[int]] = {}
        for run in {*self._run_of.values()}:
            flats.setdefault(run.on_host, set()).update(map(id, run.flats))
        options = {id(param): groups[number] for number, param in numbered(groups)}
        for run in new:
            values = run.read(state, flats.get(run.on_host, ()), self._inner.scalars)
            if not values and self._inner.is_eager:
                values = self._first_state(run, options[id(run.params[0])])
                values = self._stream.to_host(run, values) if run.on_host else values
            if values:
                self._inner.set_state(run, values)
            self._run_of |= dict.fromkeys(run.params, run)
        self._inner.keep_only(self._run_of.values())
        self._show(new, groups, state)

    def _first_state(self, run: Run, group: dict[str, Any]) -> dict[str, Any]:
        memory = run.memory(local_part(run.params[0]))
        assert memory is not None
        run.bind(memory, None)
        try:
            return self._inner.first_state(run, group)
        finally:
            run.release()

    def _show(self, runs: Sequence[Run], groups: Groups, state: State) -> None:
        kept = [(run, values) for run in runs if (values := self._inner.state_of(run)) is not None]
        if not all(run.is_shown for run, _ in kept):
            # In parameter order, like a plain optimizer, and the same on all ranks.
            new = {param for run, _ in kept for param in run.params if param not in state}
            for param in (param for _, param in numbered(groups) if param in new):
                state[param] = {}
        for run, values in kept:
            run.show(values, state, self._inner.scalars)


def _bind(plan: StepPlan, grads: Sequence[Tensor | None]) -> bool:
    """Bind memory to all runs; if one run's memory is not found, bind none and return False."""
    bound: list[Run] = []
    for run, first in zip(plan.runs, plan.firsts, strict=True):
        grad = grads[first]
        assert grad is not None
        memory, grad_memory = run.memory(local_part(run.params[0])), run.memory(local_part(grad))
        if memory is None or grad_memory is None:
            for other in bound:
                other.release()
            return False
        run.bind(memory, grad_memory)
        bound.append(run)
    return True


def _check_class(groups: Groups, param: Tensor) -> None:
    local = local_part(param)
    if type(local) not in (Tensor, nn.Parameter):
        raise UnsupportedError(
            f"ShardedOptimizer: {label_of(groups, param)} is a {type(local).__name__}, expected "
            "plain tensors or DTensors of them; use an optimizer that knows this class"
        )
