"""``ShardedOptimizer``: an optimizer for sharded parameters that steps on whole buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from fullshard.errors import ArgumentTypeError, ConfigError, UnsupportedError
from fullshard.optim.groups import numbered, options_of
from fullshard.optim.inner import Inner
from fullshard.optim.states import check_state
from fullshard.optim.stepper import Stepper
from fullshard.optim.trial import check_elementwise, refuse, single_keys

_AMP = ("grad_scale", "found_inf")  # attributes that GradScaler sets for a step


class ShardedOptimizer(Optimizer):
    """An optimizer for sharded parameters that steps whole buffers with ``optimizer_class``.

    Parameters that are neighbors in a buffer of ``fully_shard``, are in one group, have gradients
    and have state of one age step as one tensor, a *run*. The host time of a step therefore depends
    on the number of units, not of parameters, and nothing goes through DTensor dispatch. Results
    are those of ``optimizer_class`` itself (fused classes may round differently).

    Usage is that of ``optimizer_class``: ``param_groups`` and ``state`` show parameters, each with
    state in the parameter's own form, so schedulers, hooks, ``GradScaler`` and
    ``torch.distributed.checkpoint`` work unchanged, and state dicts are interchangeable with those
    of ``optimizer_class``. Loaded state is copied; state set by hand is copied at the next step.
    Methods that ``optimizer_class`` adds to those of every optimizer are not available.

    Any parameters on any mesh are accepted. Plain tensors and torch's own DTensors step one by one,
    on their local tensors. A run has one value of state that is not shaped like its parameter, such
    as a step count; parameters of another age, say, once frozen ones, are in another run.

    Copies (``copy.deepcopy``, pickle) hold copies of the parameters, as with every optimizer; with
    ``copy.deepcopy((model, optimizer))`` these are the copied model's. Copies have no hooks.
    """

    def __init__(
        self,
        params: ParamsT,
        optimizer_class: type[Optimizer],
        *,
        elementwise: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Create the optimizer.

        Args:
            params: parameters, named parameters or parameter groups as for any optimizer; they may
                still be on the meta device.
            optimizer_class: a class like those of ``torch.optim``, updating each element by itself.
            elementwise: True asserts that the class does so, False that it does not; None tests
                the class on small tensors of our own.
            kwargs: arguments of ``optimizer_class``.

        Raises:
            UnsupportedError: the class is not element-wise, or ``differentiable`` is set.
            ConfigError: ``params`` is empty or contains a parameter twice.
            ArgumentTypeError: ``params`` or ``optimizer_class`` has a wrong type.
        """
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
            raise ArgumentTypeError(
                f"ShardedOptimizer: optimizer_class is {optimizer_class!r}, expected a class such "
                "as torch.optim.AdamW"
            )
        if elementwise is False:
            refuse(optimizer_class)
        self._optimizer_class = optimizer_class
        self._kwargs = kwargs
        self._is_vouched_for = elementwise is True
        self._start()
        if isinstance(params, Tensor):
            raise ArgumentTypeError(f"{self._label}: params is a tensor, expected a list of them")
        groups: list[Any] = list(params)
        if not groups:
            raise ConfigError(f"{self._label}: params is empty, expected parameters or groups")
        super().__init__(groups, dict(self._inner.defaults))

    def _start(self) -> None:
        self._inner = Inner(self._optimizer_class, self._kwargs)
        self._stepper = Stepper(self._inner)
        self._was_loaded = False

    @property
    def _label(self) -> str:
        return f"ShardedOptimizer({self._optimizer_class.__name__})"

    @property
    def num_runs(self) -> int:
        """Number of runs, each one tensor, in the last step on this rank."""
        return self._stepper.num_runs

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Tell GradScaler whether the optimizer unscales gradients by itself, as fused ones do."""
        return self._inner.knows_scaling

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have gradients.

        Args:
            closure: a function that computes loss and gradients; called before the step.

        Returns:
            The result of ``closure``, or None.

        Raises:
            ConfigError: some state does not fit its parameter; no parameter was stepped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        amp = {name: value for name, value in vars(self).items() if name in _AMP}
        with torch.no_grad():
            self._stepper.step(self.param_groups, self.state, amp, was_loaded=self._was_loaded)
        self._was_loaded = False
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as to any optimizer, for example when layers are unfrozen.

        Raises:
            ConfigError: a parameter is twice in the group, or already in another group.
            ArgumentTypeError: the group holds something that is not a tensor.
            UnsupportedError: the class is not element-wise with the options of the group.
        """
        if isinstance(param_group, dict) and not isinstance(param_group["params"], (Tensor, set)):
            param_group["params"] = list(param_group["params"])
            self._check_params(param_group["params"])
        options = {**self.defaults, **options_of(param_group)}
        if options.get("differentiable"):
            raise UnsupportedError(
                f"{self._label}: differentiable=True, but autograd does not see steps on buffers; "
                f"use {self._optimizer_class.__name__} as it is"
            )
        if not self._is_vouched_for:
            check_elementwise(self._optimizer_class, self._kwargs, options)
        self._learn([options])
        super().add_param_group(param_group)
        with torch.no_grad():
            self._stepper.prepare(self.param_groups, self.state, loaded=False)

    def _learn(self, many_options: Iterable[dict[str, Any]]) -> None:
        for options in many_options:
            self._inner.singles |= single_keys(self._optimizer_class, self._kwargs, options)

    def _check_params(self, params: Iterable[Any]) -> None:
        known = {id(param) for group in self.param_groups for param in group["params"]}
        for index, item in enumerate(params):
            name, param = item if isinstance(item, tuple) else (index, item)
            if not isinstance(param, Tensor):
                raise ArgumentTypeError(
                    f"{self._label}: parameter {name!r} is a {type(param).__name__}, expected a "
                    "tensor"
                )
            if id(param) in known:
                raise ConfigError(
                    f"{self._label}: parameter {name!r}, of shape {tuple(param.shape)}, is given "
                    "twice; give each parameter once, also tied ones"
                )
            known.add(id(param))

    def __getstate__(self) -> dict[str, Any]:
        mine = ("_optimizer_class", "_kwargs", "_is_vouched_for")
        return {**super().__getstate__(), **{name: vars(self)[name] for name in mine}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy; also called at the end of ``load_state_dict``.

        Raises:
            ConfigError: some state does not fit its parameter; nothing was loaded.
        """
        if "_stepper" not in vars(self):  # a copy
            self._optimizer_class, self._kwargs = state["_optimizer_class"], state["_kwargs"]
            self._start()
        groups = state["param_groups"]
        self._learn(map(options_of, groups))
        for _, param in numbered(groups):
            check_state(groups, param, state["state"].get(param, {}), self._inner.singles)
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)  # state dicts of older versions lack some options
        with torch.no_grad():
            self._stepper.prepare(self.param_groups, self.state, loaded=True)
        self._was_loaded = True
