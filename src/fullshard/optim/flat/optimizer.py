"""``ShardedOptimizer``: an optimizer for sharded parameters that steps buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from fullshard.optim.base import Outer
from fullshard.optim.flat.plan import StepPlan
from fullshard.optim.flat.scalars import check_state
from fullshard.optim.flat.step import Stepper
from fullshard.optim.host import FRACTION, checked_fraction, hosted
from fullshard.optim.inner import numbered, options_of
from fullshard.optim.probe import Probe, Unchanged


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
        self._stepper = Stepper(self._inner, self._fractions)

    @property
    def num_runs(self) -> int:
        """Number of runs, each one tensor, in the last step on this rank."""
        return self._stepper.num_runs

    @property
    def state(self) -> Any:
        """State by parameter; waits until what lives in host memory is that of the last step."""
        if "_stepper" in vars(self):
            self._stepper.wait()
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        vars(self)["state"] = state  # where Optimizer.__setstate__ puts it

    @property
    def _state(self) -> Any:
        return vars(self)["state"]

    def _prepare(self) -> StepPlan:
        return self._stepper.plan(self.param_groups, self._state)

    def _step(self, ready: StepPlan, amp: dict[str, Tensor]) -> None:
        was_loaded = self._was_loaded
        self._stepper.step(ready, self.param_groups, self._state, amp, was_loaded=was_loaded)

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
            self._check_random(param_group["params"], probe, "elementwise=True")
        self._learn([options])
        super().add_param_group(param_group)
        self._fractions.append(fraction)
        self._convert_group()
        with torch.no_grad():
            self._stepper.prepare(self.param_groups, self.state, loaded=False)

    def params_on_host(self) -> list[Tensor]:
        """Return the parameters whose state lives in host memory, or will once they step."""
        chosen = hosted(self.param_groups, self._fractions)
        return [param for _, param in numbered(self.param_groups) if id(param) in chosen]

    def _protect(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Keep state that lives in host memory off the device."""
        chosen = set(map(id, self.params_on_host()))
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        params = (param for _, param in numbered(self.param_groups))
        kept = {n for n, param in zip(numbers, params, strict=False) if id(param) in chosen}
        state = {
            number: {
                key: Unchanged(one) if isinstance(one, Tensor) and key != "step" else one
                for key, one in own.items()
            }
            if number in kept
            else own
            for number, own in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    def check_loaded(self, state: dict[str, Any]) -> None:
        """Check loaded groups and state, and change nothing."""
        _unwrap(state["state"])
        groups = state["param_groups"]
        self._learn(map(options_of, groups))
        for group in () if self._is_vouched_for else groups:
            self._probe({**self._inner.defaults, **options_of(group)}).check_elementwise()
        for _, param in numbered(groups):
            check_state(groups, param, state["state"].get(param, {}), self._inner.scalars)

    def _adopt_loaded(self) -> None:
        self._stepper.prepare(self.param_groups, self.state, loaded=True)


def _unwrap(state: Any) -> None:
    """Give tensors that were ``Unchanged`` the dtypes of their parameters."""
    for param, own in state.items():
        for key, one in own.items() if isinstance(own, dict) else ():
            if isinstance(one, Unchanged):
                value: Any = one.value
                own[key] = value.to(param.dtype) if param.is_floating_point() else value
