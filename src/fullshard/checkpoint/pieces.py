"""Optimizers that step plain pieces or flat parameters, seen as if they stepped DTensors.

What ``FullyShardedDataParallel`` shows between steps is plain: pieces of parameters, or one flat
parameter for each unit, whose state is cut here and joined again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fullshard.checkpoint.tree import Tree
from fullshard.errors import ConfigError
from fullshard.frontend.places import Held
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

    def show(self, value: Any, whole: Tensor) -> Any:
        """The state that belongs to it; ``whole`` is what the optimizer steps."""
        if self.held is None or not _is_alike(value, whole):
            return value
        return self.held.as_dtensor(self._slice(value))

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
        numbers: dict[int, list[int]] = {}
        state: dict[int, dict[str, Any]] = {}
        count = 0
        for number, param in enumerate(stepped):
            for part in self._of([param]):
                numbers.setdefault(number, []).append(count)
                if number in own["state"]:
                    kept = own["state"][number].items()
                    state[count] = {key: part.show(value, param) for key, value in kept}
                count += 1
        groups = [
            {**group, "params": [new for old in group["params"] for new in numbers.get(old, [])]}
            for group in own["param_groups"]
        ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Join what ``state_dict`` cut.

        Raises:
            ConfigError: parts of one flat parameter have different state.
        """
        own: dict[int, dict[str, Any]] = {}
        count = 0
        for number, param in enumerate(self._stepped()):
            parts = list(self._of([param]))
            kept = [state["state"].get(count + i) for i in range(len(parts))]
            count += len(parts)
            if any(one is not None for one in kept):
                own[number] = self._joined(param, parts, kept)
        groups = []
        first = 0
        for group, loaded in zip(self._optimizer.param_groups, state["param_groups"], strict=True):
            end = first + len(group["params"])
            groups.append({**loaded, "params": list(range(first, end))})
            first = end
        self._optimizer.load_state_dict({"state": own, "param_groups": groups})

    def _joined(
        self, param: Tensor, parts: list[_Part], kept: list[dict[str, Any] | None]
    ) -> dict[str, Any]:
        """The state of ``param`` from that of its parts; zeros for a part that has none."""
        keys = list(dict.fromkeys(key for one in kept if one is not None for key in one))
        joined: dict[str, Any] = {}
        for key in keys:
            values = [None if one is None else one.get(key) for one in kept]
            like = next((value for value in values if value is not None), None)
            if not (isinstance(like, Tensor) and like.dim() > 0):
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
        if any(value is None or bool(value != first) for value in values if value is not first):
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


def _is_alike(value: Any, whole: Tensor) -> bool:
    """Whether it has an element for each of the parameter's."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == whole.shape
