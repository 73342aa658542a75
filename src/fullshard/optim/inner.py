"""Groups of parameters, and the inner optimizer that steps their local memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fullshard._torch import autograd as _autograd
from fullshard._torch import nn as _nn

Groups = Sequence[dict[str, Any]]  # an optimizer's ``param_groups``

_NAMES = ("params", "param_names")


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a group without its parameters and their names."""
    return {key: value for key, value in group.items() if key not in _NAMES}


class KeptOptions:
    """Options of groups, as they were before a step that is made in several parts."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._options = [options_of(group) for group in groups]
        values = [value for options in self._options for value in options.values()]
        self._tensors = [(one, one.clone()) for one in values if isinstance(one, Tensor)]
        self._counted = [before for _, before in self._tensors]

    def restore(self) -> None:
        """Take back all that the class has counted since, so that it counts that once a step."""
        for group, options in zip(self._groups, self._options, strict=True):
            for key in options_of(group).keys() - options.keys():
                del group[key]
            group.update(options)
        with torch.no_grad():
            for tensor, before in self._tensors:
                tensor.copy_(before)

    def keep_counts(self) -> None:
        """Keep what a part of the step has counted in tensors; ``restore`` takes it back."""
        both = zip(self._tensors, self._counted, strict=True)
        self._counted = [torch.where(one == before, last, one) for (one, before), last in both]

    def give_counts(self) -> None:
        """Write to the tensors what all parts of the step have counted in them."""
        with torch.no_grad():
            for (tensor, _), counted in zip(self._tensors, self._counted, strict=True):
                tensor.copy_(counted)

    def changes(self) -> list[dict[str, Any]]:
        """Return, for each group, the options that have become other objects."""
        pairs = zip(self._groups, self._options, strict=True)
        return [
            {key: v for key, v in options_of(group).items() if options.get(key, _MISSING) is not v}
            for group, options in pairs
        ]

    def has_changed(self) -> bool:
        """Return whether any option is another than before."""
        return [options_of(group) for group in self._groups] != self._options or not all(
            torch.equal(tensor, before) for tensor, before in self._tensors
        )


def numbered(groups: Groups) -> Iterator[tuple[int, Tensor]]:
    """Yield the group number of each parameter, and the parameter."""
    for number, group in enumerate(groups):
        for param in group["params"]:
            yield number, param


def named(groups: Groups) -> Iterator[tuple[int, str, Tensor]]:
    """Yield the group number of each parameter, its name or "", and the parameter."""
    for number, group in enumerate(groups):
        names = group.get("param_names") or [""] * len(group["params"])
        for name, param in zip(names, group["params"], strict=True):
            yield number, name, param


def label_of(groups: Groups, param: Tensor) -> str:
    """Return a label for error messages: the name of ``param`` if given, else index or shape."""
    for number, group in enumerate(groups):
        for index, one in enumerate(group["params"]):
            if one is param:
                names = group.get("param_names")
                if names:
                    return f"parameter {names[index]!r}"
                return f"parameter {index} of group {number}, of shape {tuple(param.shape)}"
    return f"a parameter of shape {tuple(param.shape)}"


AMP = ("grad_scale", "found_inf")
"""Attributes that GradScaler sets for a step."""
_MISSING = object()
_ONCE = (nullcontext(),)


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return what the closure of a step returns, or None; it may compute gradients."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def step_without_hooks(optimizer: Optimizer) -> None:
    """Call ``optimizer.step()`` without global hooks; those run for the user's optimizer."""
    step: Any = type(optimizer).step
    if step.__code__ is _nn.CALLS_STEP_HOOKS:
        step = step.__wrapped__
    step(optimizer)


EMPTY = torch.empty(0, device="cpu")


class Steppable:
    """A parameter of the inner optimizer: a run of parameters, a full matrix or a block.

    Attributes:
        tensor: the parameter; it has no memory between steps.
        group: number of its group.
    """

    def __init__(self, empty: Tensor = EMPTY, group: int = 0) -> None:
        """Create a parameter that is ``empty`` between steps."""
        self._empty, self.group = empty, group
        self.tensor = nn.Parameter(empty.clone())

    def bind(self, memory: Tensor, grad: Tensor | None) -> None:
        """Bind ``memory`` and ``grad`` to the tensor."""
        self.tensor.data = memory
        _autograd.set_grad(self.tensor, grad)

    def release(self) -> None:
        """Release memory and gradient of the tensor."""
        self.tensor.grad = None
        self.tensor.data = self._empty


class Inner:
    """An optimizer of the user's class whose parameters are the tensors of runs."""

    def __init__(self, optimizer_class: type[Optimizer], kwargs: dict[str, Any]) -> None:
        # 2-D, so that matrix optimizers accept it: they are refused later with a better reason.
        stand_in = nn.Parameter(torch.zeros(2, 2, device="cpu"))
        self._optimizer = optimizer_class([stand_in], **kwargs)
        self._class, self._kwargs = optimizer_class, kwargs
        self.is_eager = bool(self._optimizer.state)  # has state before the first step
        self.defaults = dict(self._optimizer.defaults)
        self.scalars: frozenset[str] = frozenset({"step"})  # see ``is_cut``
        self._optimizer.param_groups.clear()
        self._optimizer.state.clear()

    def converted(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return a group's options as the class keeps them, such as a rate made a tensor."""
        self._optimizer.add_param_group({"params": [], **options})
        return options_of(self._optimizer.param_groups.pop())

    @property
    def knows_scaling(self) -> bool:
        """Return whether the optimizer unscales gradients by itself, as fused ones do."""
        return bool(getattr(self._optimizer, "_step_supports_amp_scaling", False))

    def set_runs(self, groups: Groups, runs: Iterable[Steppable]) -> None:
        """Replace the runs to step on."""
        mine = self._optimizer.param_groups
        del mine[len(groups) :]
        for group in groups[len(mine) :]:
            self._optimizer.add_param_group({"params": [], **options_of(group)})
        for known in mine:
            known["params"].clear()
        for run in runs:
            mine[run.group]["params"].append(run.tensor)

    def state_of(self, run: Steppable) -> dict[str, Any] | None:
        """Return the optimizer's state of the run; None if it has none."""
        return self._optimizer.state.get(run.tensor)

    def set_state(self, run: Steppable, values: dict[str, Any]) -> None:
        """Replace the optimizer's state of the run."""
        self._optimizer.state[run.tensor] = values

    def forget(self, run: Steppable) -> None:
        """Delete the optimizer's state of the run."""
        self._optimizer.state.pop(run.tensor, None)

    def keep_only(self, runs: Iterable[Steppable]) -> None:
        """Delete the state of all runs except ``runs``."""
        kept = {id(run.tensor) for run in runs}
        for tensor in [t for t in self._optimizer.state if id(t) not in kept]:
            del self._optimizer.state[tensor]

    def first_state(self, run: Steppable, group: dict[str, Any]) -> dict[str, Any]:
        """Return the state that the class creates at construction; the run must have memory."""
        made = self._class([{"params": [run.tensor], **options_of(group)}], **self._kwargs)
        return dict(made.state.get(run.tensor, {}))

    def read_again(self) -> None:
        """Let the class upgrade its state, as after loading a state dict of an older version."""
        known = self._optimizer
        known.__setstate__({"state": known.state, "param_groups": known.param_groups})

    def step(
        self,
        groups: Groups,
        amp: Mapping[str, Tensor],
        turns: Iterable[AbstractContextManager[None]] = _ONCE,
    ) -> None:
        """Step once with the options of ``groups``, and write changed options back to them.

        Args:
            groups: the user's groups; some classes keep counters in theirs.
            amp: attributes set by a GradScaler, see ``knows_scaling``.
            turns: contexts in each of which some of the runs step; what the class counts in its
                groups it counts once all the same.
        """
        for name in AMP:
            vars(self._optimizer).pop(name, None)
        vars(self._optimizer).update(amp)
        changed: list[dict[str, Any]] = [{} for _ in groups]
        kept = None if turns is _ONCE else KeptOptions(groups)
        for turn in turns:
            if kept is not None:
                kept.restore()
            with turn:
                for mine, group in zip(self._optimizer.param_groups, groups, strict=True):
                    for key in mine.keys() - group.keys() - self._optimizer.defaults.keys():
                        del mine[key]  # the class made it in an earlier turn
                    mine.update(options_of(group))
                step_without_hooks(self._optimizer)
            for mine, group, its in zip(self._optimizer.param_groups, groups, changed, strict=True):
                own = options_of(mine).items()
                its.update({k: v for k, v in own if group.get(k, _MISSING) is not v})
            if kept is not None:
                kept.keep_counts()
        for group, its in zip(groups, changed, strict=True):
            group.update(its)
        if kept is not None:
            kept.give_counts()
