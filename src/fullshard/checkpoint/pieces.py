"""Optimizers that step plain pieces or flat parameters, seen as if they stepped DTensors.

What ``FullyShardedDataParallel`` shows between steps is plain: pieces of parameters, or one flat
parameter for each unit, whose state is cut here and joined again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.checkpoint.tree import Tree
from fullshard.errors import ConfigError
from fullshard.frontend.places import Held
from fullshard.optim.states import is_cut_tensor, one_for_many
from fullshard.optim.trial import singles_of
from fullshard.tensors import local_part

__all__ = ["ByParameters", "by_parameters"]


def by_parameters(optimizer: Optimizer, tree: Tree) -> Optimizer | ByParameters:
    """``optimizer`` itself where it steps what state dicts hold, else a view of it."""
    shown = {id(param) for _, param in tree.named()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if all(id(param) in shown for param in params):
        return optimizer
    return ByParameters(optimizer, tree)


class _Part(NamedTuple):
    """A parameter that is all, or a slice, of what the optimizer steps."""

    shown: Tensor
    held: Held | None
    offset: int = 0  # in a flat parameter

    def show(self, value: Any) -> Any:
        """The state that belongs to it, from one with an element for each the optimizer steps."""
        return value if self.held is None else self.held.as_dtensor(self._slice(value))

    def put(self, value: Any, whole: Tensor) -> None:
        """Copy its state to where it belongs in ``whole``."""
        self._slice(whole).copy_(local_part(value).reshape(self._local.shape))

    def _slice(self, value: Tensor) -> Tensor:
        return value.view(-1)[self.offset :][: self._local.numel()].view(self._local.shape)

    @property
    def _local(self) -> Tensor:
        return self.shown if self.held is None else self.held.param


class ByParameters:
    """The side of an optimizer that state dicts look at, parameter by parameter."""

    def __init__(self, optimizer: Optimizer, tree: Tree) -> None:
        self._optimizer = optimizer
        self._parts = _parts_by_param(tree)
        self.param_groups = [
            {**group, "params": [part.shown for part in self._of(group["params"])]}
            for group in optimizer.param_groups
        ]

    def _of(self, params: list[Tensor]) -> Iterator[_Part]:
        for param in params:
            yield from self._parts.get(id(param), [_Part(param, None)])

    def _stepped(self) -> list[Tensor]:
        return [param for group in self._optimizer.param_groups for param in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """As of an optimizer, with numbers of parameters."""
        own = self._optimizer.state_dict()
        stepped = self._stepped()
        singles = self._singles(stepped, own["state"])
        numbers: dict[int, list[int]] = {}
        state: dict[int, dict[str, Any]] = {}
        count = 0
        for number, param in enumerate(stepped):
            for part in self._of([param]):
                numbers.setdefault(number, []).append(count)
                if number in own["state"]:
                    state[count] = {
                        key: part.show(value)
                        if is_cut_tensor(param, key, value, singles)
                        else value
                        for key, value in own["state"][number].items()
                    }
                count += 1
        groups = [
            {**group, "params": [new for old in group["params"] for new in numbers.get(old, [])]}
            for group in own["param_groups"]
        ]
        return {"state": state, "param_groups": groups}

    def _singles(self, stepped: list[Tensor], state: Mapping[int, Mapping[str, Any]]) -> set[str]:
        """Names of state that has one value for any parameter, see ``is_cut``."""
        seen = (
            (stepped[number].shape, key, value.shape)
            for number, kept in state.items()
            for key, value in kept.items()
            if isinstance(value, Tensor)
        )
        return one_for_many(seen) | singles_of(self._optimizer)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Join what ``state_dict`` cut.

        Raises:
            ConfigError: parts of one flat parameter have different state.
        """
        own: dict[int, dict[str, Any]] = {}
        number_of: dict[int, int] = {}
        for number, param in enumerate(self._stepped()):
            parts = list(self._of([param]))
            first = len(number_of)
            kept = [state["state"].get(first + i) for i in range(len(parts))]
            number_of |= dict.fromkeys(range(first, first + len(parts)), number)
            if any(one is not None for one in kept):
                own[number] = self._joined(param, parts, kept)
        groups = [
            {**group, "params": list(dict.fromkeys(number_of[part] for part in group["params"]))}
            for group in state["param_groups"]
        ]
        self._optimizer.load_state_dict({"state": own, "param_groups": groups})

    def _joined(
        self, param: Tensor, parts: list[_Part], kept: list[dict[str, Any] | None]
    ) -> dict[str, Any]:
        """The state of ``param`` from that of its parts; zeros for a part that has none."""
        if parts[0].held is None and kept[0] is not None:
            return kept[0]  # no wrapper's: it is its only part
        keys = list(dict.fromkeys(key for one in kept if one is not None for key in one))
        joined: dict[str, Any] = {}
        for key in keys:
            values = [None if one is None else one.get(key) for one in kept]
            like = next((value for value in values if value is not None), None)
            if not isinstance(like, DTensor):
                joined[key] = self._same(key, parts, values)
                continue
            whole = torch.zeros_like(param, dtype=like.dtype)
            for part, value in zip(parts, values, strict=True):
                if value is not None:
                    part.put(value, whole)
            joined[key] = whole
        return joined

    def _same(self, key: str, parts: list[_Part], values: list[Any]) -> Any:
        first = values[0]
        others = [value for value in values if value is not first]
        if any(value is None or not _is_equal(value, first) for value in others):
            names = [part.held.bucket.names[part.held.number] for part in parts if part.held]
            raise ConfigError(
                f"optimizer state {key!r} differs between {', '.join(names)}, or some have none; "
                "one flat parameter holds them. Use use_orig_params=True"
            )
        return first


def _parts_by_param(tree: Tree) -> dict[int, list[_Part]]:
    """What the parameters of an optimizer consist of, by their id."""
    found: dict[int, list[_Part]] = {}
    for held in tree.all_held():
        front = held.bucket.front
        part = _Part(tree.shown(held), held)
        if front is None:
            found[id(held.param)] = [part]
        else:
            offset = held.bucket.spec.pieces[held.number].offset
            found.setdefault(id(front.param), []).append(part._replace(offset=offset))
    return found


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)
