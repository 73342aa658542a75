"""``ShardedOptimizer``: an optimizer for sharded parameters that steps buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from fullshard.errors import UnsupportedError
from fullshard.optim.base import Outer
from fullshard.optim.flat.plan import Candidate, StepPlan, align, plan_runs
from fullshard.optim.flat.run import Run
from fullshard.optim.flat.scalars import check_state, state_keys_of
from fullshard.optim.flat.stream import Stream
from fullshard.optim.host import FRACTION, checked_fraction, hosted
from fullshard.optim.inner import Groups, label_of, numbered, options_of
from fullshard.optim.probe import Probe, Unchanged, keep_unchanged
from fullshard.tensors import local_part


class ShardedOptimizer(Outer):
    """An optimizer for sharded parameters that steps buffers with ``optimizer_class``.

    Parameters that are neighbors in a buffer of ``fully_shard``, are in one group, have gradients
    and have equal scalar state step as one tensor, a *run*. So the host time of a step depends on
    the number of units, not of parameters, and nothing goes through DTensor dispatch. Results
    are those of ``optimizer_class`` itself (fused classes may round differently).

    Usage is that of ``optimizer_class``: ``param_groups`` and ``state`` show parameters, each with
    state in the parameter's own form. So schedulers, hooks, ``GradScaler`` and
    ``torch.distributed.checkpoint`` work unchanged, and state dicts are interchangeable with those
    of ``optimizer_class``. Loaded state is copied; state set by hand is copied at the next step.
    Methods that ``optimizer_class`` adds to those of every optimizer are not available.

    Any parameters on any mesh are accepted. Plain tensors and torch's own DTensors step one by one,
    on their local tensors. A run has one value of state that is not shaped like its parameter, such
    as a step count; parameters with another count, once frozen ones, say, are in another run.

    With ``host_fraction`` part of the state lives in (pinned) host memory and comes to the device
    for the step, the state of two runs at a time. ``state`` shows it there; reading ``state`` waits
    until it is that of the last step, so read a tensor through ``state``, not held from before.

    Copies (``copy.deepcopy``, pickle) hold copies of the parameters, as with every optimizer; with
    ``copy.deepcopy((model, optimizer))`` these are the copied model's. Copies have no hooks.
    """

    _mine = (*Outer._mine, "_is_vouched_for", "_host_fraction", "_fractions")

    def __init__(
        self,
        params: ParamsT,
        optimizer_class: type[Optimizer],
        *,
        elementwise: bool | None = None,
        host_fraction: float = 0.0,
        **kwargs: Any,
    ) -> None:
        """Create the optimizer.

        Args:
            params: parameters, named parameters or parameter groups as for any optimizer; they may
                still be on the meta device.
            optimizer_class: a class like those of ``torch.optim``, updating each element by itself.
            elementwise: True asserts that the class does so, False that it does not; None tests
                the class on small tensors of our own.
            host_fraction: the smallest share of the state's bytes that lives in host memory. The
                state of a unit's parameters in one group moves as a whole. A group may have its own
                ``host_fraction``. State dicts do not contain it.
            kwargs: arguments of ``optimizer_class``.

        Raises:
            UnsupportedError: the class is not element-wise, or uses random numbers, or
                ``differentiable`` is set.
            ConfigError: ``params`` is empty or contains a parameter twice, or a ``host_fraction``
                is not in 0 to 1.
            ArgumentTypeError: an argument has a wrong type.
        """
        self._check_optimizer_class(optimizer_class)
        if elementwise is False:
            probe = Probe(optimizer_class, kwargs, {})
            raise probe.refusal("elementwise", reason="elementwise=False says so")
        self._is_vouched_for = elementwise is True
        label = f"{type(self).__name__}({optimizer_class.__name__})"
        self._host_fraction = checked_fraction(host_fraction, label)
        self._fractions: list[float] = []  # by group
        super().__init__(params, optimizer_class, kwargs)

    def _start(self) -> None:
        super()._start()
        self._stream = Stream(self._inner)
        self._plan: StepPlan | None = None
        self._run_of: dict[Tensor, Run] = {}  # the run that holds each parameter's state

    @property
    def num_runs(self) -> int:
        """Number of runs, each one tensor, in the last step on this rank."""
        return len(self._plan.runs) if self._plan else 0

    @property
    def state(self) -> Any:
        """State by parameter; waits until what lives in host memory is that of the last step."""
        if "_stream" in vars(self):
            self._stream.wait()
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        vars(self)["state"] = state  # where Optimizer.__setstate__ puts it

    @property
    def _state(self) -> Any:
        return vars(self)["state"]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as to any optimizer, for example when layers are unfrozen.

        Raises:
            ConfigError: a parameter is twice in the group, or already in another group; or the
                ``host_fraction`` of the group is not in 0 to 1.
            ArgumentTypeError: the group holds something that is not a tensor.
            UnsupportedError: the class is not element-wise with the options of the group.
        """
        fraction = self._host_fraction
        if isinstance(param_group, dict) and FRACTION in param_group:
            param_group = dict(param_group)
            fraction = checked_fraction(param_group.pop(FRACTION), self._label)
        options = self._prepare_group(param_group)
        if not self._is_vouched_for:
            probe = self._probe(options)
            probe.check_elementwise()
            probe.check_random(param_group["params"], self._label, "elementwise=True")
        self._learn([options])
        super().add_param_group(param_group)
        self._fractions.append(fraction)
        self._convert_group()
        if self._inner.is_eager:
            with torch.no_grad():
                self._adopt(loaded=False)

    def params_on_host(self) -> list[Tensor]:
        """Return the parameters whose state lives in host memory, or will once they step."""
        chosen = hosted(self.param_groups, self._fractions)
        return [param for _, param in numbered(self.param_groups) if id(param) in chosen]

    def _protect(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Keep state that lives in host memory off the device."""
        chosen = set(map(id, self.params_on_host()))
        pairs = zip(numbered(state_dict["param_groups"]), numbered(self.param_groups), strict=False)
        kept = {number for (_, number), (_, param) in pairs if id(param) in chosen}
        return keep_unchanged(state_dict, kept, but=("step",))

    def check_loaded(self, state: dict[str, Any]) -> None:
        """Check loaded groups and state, and change nothing."""
        _unwrap(state["state"])
        groups = state["param_groups"]
        self._learn(map(options_of, groups))
        self._check_options(groups)
        for group in () if self._is_vouched_for else groups:
            self._probe({**self._inner.defaults, **options_of(group)}).check_elementwise()
        for _, param in numbered(groups):
            check_state(groups, param, state["state"].get(param, {}), self._inner.scalars)

    def _adopt_loaded(self) -> None:
        self._adopt(loaded=True)

    def _adopt(self, *, loaded: bool) -> None:
        """Adopt state that was ``loaded``, or create what the class creates at construction.

        Parameters on the meta device are skipped until later.
        """
        self._find_runs(
            (number, param, None)
            for number, param in numbered(self.param_groups)
            if (param in self._state) == loaded and not local_part(param).is_meta
        )

    # steps

    def _prepare(self) -> StepPlan:
        """Return the runs of all parameters that have gradients, with memory bound to them.

        While parameters, gradients and state stay in the same memory, this checks parameters only
        in passes over lists. Otherwise the runs are recomputed; parameters that change from one run
        to another keep their state.
        """
        groups, plan = self.param_groups, self._plan
        params = list(chain.from_iterable(map(itemgetter("params"), groups)))
        grads: list[Tensor | None] = list(map(attrgetter("grad"), params))
        if not (
            plan
            and plan.is_valid(groups, params, grads)
            and all(run.is_untouched(self._state) for run in plan.runs)
        ):
            self._plan = None
            align(params, grads)
            pairs = zip(numbered(groups), grads, strict=True)
            found = self._find_runs((*one, grad) for one, grad in pairs if grad is not None)
            plan = StepPlan(groups, params, grads, *found)
            self._stream.set_runs(groups, plan.runs)
        plan.bind(grads)
        return plan

    def _step(self, ready: StepPlan, amp: dict[str, Tensor]) -> None:
        try:
            if self._was_loaded:
                self._inner.read_again()
            self._inner.step(self.param_groups, amp, self._stream.turns(self.param_groups))
            self._show(ready.runs)
        finally:
            self._stream.leave()
            for run in ready.runs:
                run.release()
        self._plan = ready
        torch.autograd.graph.increment_version(ready.exposed)

    def _find_runs(
        self, members: Iterable[tuple[int, Tensor, Tensor | None]]
    ) -> tuple[list[Run], list[Candidate]]:
        """Return the runs of parameters, with their state in place, and the facts behind them.

        ``members``: number of the group, parameter and gradient, see ``Candidate``.
        """
        self._stream.wait()
        given = list(members)
        params = [param for _, param, _ in given]
        for param in params:
            _check_class(self.param_groups, param)
            own = self._state.get(param, {})
            check_state(self.param_groups, param, own, self._inner.scalars)
        keys = state_keys_of(params, self._state, self._inner.scalars)
        chosen = hosted(self.param_groups, self._fractions) if any(self._fractions) else None
        hosts = [None if chosen is None else id(param) in chosen for param in params]
        candidates = [
            Candidate(*one, key, on_host)
            for one, key, on_host in zip(given, keys, hosts, strict=True)
        ]
        runs = list(map(self._known, plan_runs(candidates)))
        self._settle([run for run in runs if run is not self._run_of.get(run.params[0])])
        return runs, candidates

    def _known(self, run: Run) -> Run:
        """Return the existing run like ``run`` if users still see its state, else ``run``."""
        old = self._run_of.get(run.params[0])
        if old is None or not old.is_like(run) or not old.is_untouched(self._state):
            return run
        old.group = run.group
        return old

    def _settle(self, new: Sequence[Run]) -> None:
        """Give the runs in ``new`` the state of their parameters."""
        flats: dict[bool | None, set[int]] = {}
        for run in {*self._run_of.values()}:
            flats.setdefault(run.on_host, set()).update(map(id, run.flats.values()))
        for run in new:
            values = run.read(self._state, flats.get(run.on_host, ()), self._inner.scalars)
            if not values and self._inner.is_eager:
                values = self._first_state(run)
                values = self._stream.to_host(run, values) if run.on_host else values
            if values:
                self._inner.set_state(run, values)
            self._run_of |= dict.fromkeys(run.params, run)
        self._inner.keep_only(self._run_of.values())
        self._show(new)

    def _first_state(self, run: Run) -> dict[str, Any]:
        run.bind(run.memory(local_part(run.params[0])), None)
        try:
            return self._inner.first_state(run, self.param_groups[run.group])
        finally:
            run.release()

    def _show(self, runs: Sequence[Run]) -> None:
        kept = [(run, values) for run in runs if (values := self._inner.state_of(run)) is not None]
        if not all(run.is_shown for run, _ in kept):
            # In parameter order, like a plain optimizer, and the same on all ranks.
            new = {param for run, _ in kept for param in run.params if param not in self._state}
            for _, param in numbered(self.param_groups):
                if param in new:
                    self._state[param] = {}
        for run, values in kept:
            run.show(values, self._state, self._inner.scalars)


def _check_class(groups: Groups, param: Tensor) -> None:
    local = local_part(param)
    if type(local) not in (Tensor, nn.Parameter):
        raise UnsupportedError(
            f"ShardedOptimizer: {label_of(groups, param)} is a {type(local).__name__}, expected "
            "plain tensors or DTensors of them; use an optimizer that knows this class"
        )


def _unwrap(state: Any) -> None:
    """Give tensors that were ``Unchanged`` the dtypes of their parameters."""
    for param, own in state.items():
        for key, one in own.items() if isinstance(own, dict) else ():
            if isinstance(one, Unchanged):
                value: Any = one.value
                own[key] = value.to(param.dtype) if param.is_floating_point() else value
