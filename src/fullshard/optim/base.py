"""The base class of optimizers that step their own tensors with an inner optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from fullshard.engine.steps import refused
from fullshard.errors import ArgumentTypeError, ConfigError, UnsupportedError
from fullshard.optim.host import refuse_fraction
from fullshard.optim.inner import AMP, Inner, loss_of, options_of
from fullshard.optim.probe import Probe


class Outer(Optimizer, ABC):
    """An optimizer whose groups and state are those of ``optimizer_class``, run on other tensors.

    ``_mine`` names the attributes that a copy gets; ``_start`` makes all others.
    """

    _mine: ClassVar[tuple[str, ...]] = ("_optimizer_class", "_kwargs")

    def __init__(
        self, params: Any, optimizer_class: type[Optimizer], kwargs: dict[str, Any]
    ) -> None:
        """Create the optimizer; see the subclasses."""
        refuse_fraction(kwargs, type(self).__name__)
        self._optimizer_class = optimizer_class
        self._kwargs = kwargs
        self._start()
        if isinstance(params, Tensor):
            raise ArgumentTypeError(f"{self._label}: params is a tensor, expected a list of them")
        groups: list[Any] = list(params)
        if not groups:
            raise ConfigError(f"{self._label}: params is empty, expected parameters or groups")
        super().__init__(groups, dict(self._inner.defaults))

    @classmethod
    def _check_optimizer_class(cls, optimizer_class: object) -> None:
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
            raise ArgumentTypeError(
                f"{cls.__name__}: optimizer_class is {optimizer_class!r}, expected a class such as "
                "torch.optim.AdamW"
            )

    def _start(self) -> None:
        self._inner = Inner(self._optimizer_class, self._kwargs)
        self._was_loaded = False

    @property
    def _label(self) -> str:
        return f"{type(self).__name__}({self._optimizer_class.__name__})"

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
        loss = loss_of(closure)
        self.step_within(self)
        return loss

    @torch.no_grad()
    def step_within(self, outer: Optimizer) -> None:
        """Do the work of ``step`` as the first part of a step of ``outer``."""
        try:
            ready = self._prepare()
        except (ConfigError, UnsupportedError):
            refused(outer)
            raise
        self._step(ready, {name: value for name, value in vars(self).items() if name in AMP})
        self._was_loaded = False

    @abstractmethod
    def _prepare(self) -> Any:
        """Check everything that may be refused, and return what ``_step`` needs.

        Raises:
            ConfigError, UnsupportedError: on all ranks, if all ranks know the reason.
        """

    @abstractmethod
    def _step(self, ready: Any, amp: dict[str, Tensor]) -> None:
        """Step all parameters that have gradients; ``amp``: see ``Inner.step``."""

    def _prepare_group(self, param_group: dict[str, Any]) -> dict[str, Any]:
        """Check a group that is to be added; return its options, with defaults."""
        if isinstance(param_group, dict) and not isinstance(param_group["params"], set):
            given = param_group["params"]
            param_group["params"] = [given] if isinstance(given, Tensor) else list(given)
            self._check_params(param_group["params"])
        options = {**self.defaults, **options_of(param_group)}
        refuse_fraction(options, self._label)
        if options.get("differentiable"):
            raise UnsupportedError(
                f"{self._label}: differentiable=True, but autograd does not see steps on buffers; "
                f"use {self._optimizer_class.__name__} as it is"
            )
        return options

    def _convert_group(self) -> None:
        """Have the class convert options of the last group, as torchao's do with a rate."""
        group = self.param_groups[-1]
        group.update(self._inner.converted(options_of(group)))

    def _check_options(self, groups: Iterable[dict[str, Any]]) -> None:
        """Raise what the class raises for the options of loaded groups."""
        for group in groups:
            self._inner.converted({**self.defaults, **options_of(group)})

    def _probe(self, options: dict[str, Any]) -> Probe:
        return Probe(self._optimizer_class, self._kwargs, options)

    def _learn(self, many_options: Iterable[dict[str, Any]]) -> None:
        for options in many_options:
            self._inner.scalars |= self._probe(options).scalar_keys()

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
        return {**super().__getstate__(), **{name: vars(self)[name] for name in self._mine}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and state."""
        last = self.register_load_state_dict_pre_hook(lambda _, given: self._protect(given))
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()

    @abstractmethod
    def _protect(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Wrap tensors that ``load_state_dict`` must not cast in ``Unchanged``."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy; also called at the end of ``load_state_dict``.

        Raises:
            ConfigError, UnsupportedError: see ``check_loaded``; nothing was loaded.
        """
        is_copy = "_inner" not in vars(self)
        if is_copy:
            vars(self).update({name: state[name] for name in self._mine})
            self._start()
        else:
            self.check_loaded(state)
        self._learn(map(options_of, state["param_groups"]))
        super().__setstate__(state)
        for group in self.param_groups:  # state dicts of older versions lack some options
            for key, value in self.defaults.items():
                group.setdefault(key, value)
            group.update(self._inner.converted(options_of(group)))
        with torch.no_grad():
            self._adopt_loaded()
        self._was_loaded = True

    @abstractmethod
    def check_loaded(self, state: dict[str, Any]) -> None:
        """Check loaded groups and state, and change nothing.

        Raises:
            ConfigError: some state does not fit its parameter, or the class does not make it.
            UnsupportedError: the class is refused with the options of a group.
        """

    @abstractmethod
    def _adopt_loaded(self) -> None:
        """Give the inner optimizer the state in ``state``."""
