"""``ShardedOptimizer``: an optimizer for sharded parameters that steps on whole buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from fullshard.errors import UnsupportedError
from fullshard.optim.draws import draws_random_numbers
from fullshard.optim.grain import Recipe
from fullshard.optim.groups import numbered, options_of
from fullshard.optim.outer import Outer
from fullshard.optim.states import check_state
from fullshard.optim.stepper import Stepper
from fullshard.optim.trial import check_elementwise, refuse


class ShardedOptimizer(Outer):
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

    _mine = (*Outer._mine, "_is_vouched_for")

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
            UnsupportedError: the class is not element-wise, or draws random numbers, or
                ``differentiable`` is set.
            ConfigError: ``params`` is empty or contains a parameter twice.
            ArgumentTypeError: ``params`` or ``optimizer_class`` has a wrong type.
        """
        self._check_optimizer_class(optimizer_class)
        if elementwise is False:
            refuse(optimizer_class)
        self._is_vouched_for = elementwise is True
        super().__init__(params, optimizer_class, kwargs)

    def _start(self) -> None:
        super()._start()
        self._stepper = Stepper(self._inner)

    @property
    def num_runs(self) -> int:
        """Number of runs, each one tensor, in the last step on this rank."""
        return self._stepper.num_runs

    def _step(self, amp: dict[str, Tensor]) -> None:
        self._stepper.step(self.param_groups, self.state, amp, was_loaded=self._was_loaded)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as to any optimizer, for example when layers are unfrozen.

        Raises:
            ConfigError: a parameter is twice in the group, or already in another group.
            ArgumentTypeError: the group holds something that is not a tensor.
            UnsupportedError: the class is not element-wise with the options of the group.
        """
        options = self._prepare_group(param_group)
        if not self._is_vouched_for:
            check_elementwise(self._optimizer_class, self._kwargs, options)
            self._check_draws(param_group["params"], options)
        self._learn([options])
        super().add_param_group(param_group)
        self._convert_group()
        with torch.no_grad():
            self._stepper.prepare(self.param_groups, self.state, loaded=False)

    def _check_draws(self, params: Any, options: dict[str, Any]) -> None:
        given = [params] if isinstance(params, Tensor) else params
        tensors = (one[1] if isinstance(one, tuple) else one for one in given)
        recipe = Recipe(self._optimizer_class, self._kwargs, options)
        for dtype in dict.fromkeys(one.dtype for one in tensors):
            if draws_random_numbers(recipe, dtype):
                raise UnsupportedError(
                    f"{self._label}: with {dtype} the class draws random numbers, as for "
                    "stochastic rounding, which would depend on the ranks; use OwnedOptimizer, "
                    "with seed=, or say elementwise=True to have them as they come"
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy; also called at the end of ``load_state_dict``.

        Raises:
            ConfigError: some state does not fit its parameter; nothing was loaded.
        """
        self._revive(state)
        groups = state["param_groups"]
        self._learn(map(options_of, groups))
        for _, param in numbered(groups):
            check_state(groups, param, state["state"].get(param, {}), self._inner.singles)
        self._take_state(state)
        with torch.no_grad():
            self._stepper.prepare(self.param_groups, self.state, loaded=True)
        self._was_loaded = True
