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

_AMP = ("grad_scale", "found_inf")  # what GradScaler sets for a step


class ShardedOptimizer(Optimizer):
    """``optimizer_class`` on sharded parameters, stepping on buffers instead of on parameters.

    Parameters that are neighbours in a buffer of ``fully_shard``, in one group, with state of one
    age and gradients this time, step as one tensor, a *run*. So the time of a step on the host
    depends on the number of units, not on that of parameters, and nothing goes through DTensor.
    The results are those of ``optimizer_class`` itself (fused ones may round differently).

    It is used like the optimizer it stands for: ``param_groups`` and ``state`` show parameters,
    each with state in its own form, so schedulers, hooks, ``GradScaler``, state dicts and
    ``torch.distributed.checkpoint`` see what they always see, and each other's state dicts fit.
    What is loaded is copied, and so is, at the next step, what is put into ``state`` by hand.
    Methods that the class adds to those of every optimizer are not passed on.

    Any parameters will do, on any mesh. Plain ones and torch's own DTensors step one by one, on
    their local tensors. State that is not shaped like its parameter, such as a step count, is one
    for the run; whoever is of another age, because it was frozen for a while, is in another run.

    Copies (``copy.deepcopy``, pickle) hold copies of the parameters, as those of every optimizer,
    or those that were copied with them, ``copy.deepcopy((model, optimizer))``; and no hooks.
    """

    def __init__(
        self,
        params: ParamsT,
        optimizer_class: type[Optimizer],
        *,
        elementwise: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            params: parameters, named parameters, or groups of them as for any optimizer; they may
                still be on the meta device.
            optimizer_class: a class of ``torch.optim``, or one like those, that treats each
                element by itself.
            elementwise: True vouches for it, which is otherwise tried, on small tensors of our
                own; False says that it is not so.
            kwargs: arguments of ``optimizer_class``.

        Raises:
            UnsupportedError: the class is not element-wise, or is to be differentiable.
            ConfigError: there is no parameter, or one is given twice.
            ArgumentTypeError: something is not a parameter or not an optimizer class.
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
        """How many tensors the last step was on, on this rank."""
        return self._stepper.num_runs

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """For GradScaler: a fused optimizer scales gradients back by itself."""
        return self._inner.knows_scaling

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on all parameters that have gradients.

        Args:
            closure: computes loss and gradients first.

        Returns:
            What ``closure`` returns.

        Raises:
            ConfigError: state that was loaded does not fit its parameter; nothing was stepped.
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
        """Add a group, as to any optimizer; for one, when layers are unfrozen.

        Raises:
            ConfigError: a parameter is in it twice, or in another group.
            ArgumentTypeError: it holds something that is no tensor.
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
        """Find out what state there is with the options of these groups."""
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
        """Also the last act of ``load_state_dict``.

        Raises:
            ConfigError: state does not fit its parameter; nothing was loaded.
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
                group.setdefault(key, value)  # a state dict of an older version lacks some
        with torch.no_grad():
            self._stepper.prepare(self.param_groups, self.state, loaded=True)
        self._was_loaded = True
