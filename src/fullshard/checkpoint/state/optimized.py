"""Map the parameters that an optimizer steps to the parameters of the model.

In general these are the same. With ``FullyShardedDataParallel`` an optimizer steps plain pieces of
parameters, or one flat parameter per unit, whose state this module cuts and joins.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.checkpoint.state.rows import Announced, Tree
from fullshard.errors import ConfigError
from fullshard.frontend.places import Held
from fullshard.optim.flat import is_cut, is_cut_tensor, one_for_many
from fullshard.optim.inner import Groups, numbered
from fullshard.optim.probe import scalar_keys_of
from fullshard.tensors import local_part

Kept = dict[str, Any]  # the optimizer state of one parameter
StateLike = Callable[[Tensor, str, torch.Size], DTensor | None]
StateDict = Mapping[str, Any]  # an optimizer's ``state_dict()``, in which parameters are numbers


class _Part(NamedTuple):
    """A parameter of the model that is all or a slice of one tensor that an optimizer steps."""

    name: str
    shown: Tensor
    held: Held | None = None  # None: the optimizer steps ``shown`` itself
    offset: int = 0  # elements before it in a flat parameter

    def show(self, value: Any) -> Any:
        """Return this part of state with one element per stepped element, or other state itself."""
        if self.held is None or isinstance(value, DTensor):
            return value
        return self.held.as_dtensor(self._slice(value))

    def put(self, value: Any, full: Tensor) -> None:
        """Copy the state ``value`` of this part to its slice of ``full``."""
        self._slice(full).copy_(local_part(value).reshape(self._local.shape))

    def _slice(self, value: Tensor) -> Tensor:
        return value.view(-1)[self.offset :][: self._local.numel()].view(self._local.shape)

    @property
    def _local(self) -> Tensor:
        return self.shown if self.held is None else self.held.param


class Stepped:
    """The parameters of an optimizer, each with the model's parameters that it contains.

    Args:
        tree: the model.
        optimizer: an optimizer, or only its parameter groups.

    Raises:
        ConfigError: if the optimizer has a parameter that is not in the model.
    """

    def __init__(self, tree: Tree, optimizer: Optimizer | Groups) -> None:
        if isinstance(optimizer, Sequence):
            self.groups, self.singles, label = optimizer, frozenset({"step"}), "the optimizer"
        else:
            self.groups, self.singles = optimizer.param_groups, scalar_keys_of(optimizer)
            label = type(optimizer).__name__
        self._state_like: StateLike | None = getattr(optimizer, "state_like", None)
        self._params_on_host: Callable[[], list[Tensor]]
        self._params_on_host = getattr(optimizer, "params_on_host", list)
        self._params = [param for _, param in numbered(self.groups)]
        self._parts = _parts_of(tree, self._params, label)
        self._order = {name: at for at, (name, _) in enumerate(tree.named())}

    @property
    def unwraps(self) -> bool:
        """Return whether state of wrapper subclasses has the names of their inner tensors."""
        return self._state_like is not None

    @cached_property
    def shown(self) -> dict[str, Tensor]:
        """The model's parameters by name, in the order of the optimizer."""
        return {part.name: part.shown for parts in self._parts for part in parts}

    def like(
        self, name: str, key: str, announced: Announced, singles: Container[str]
    ) -> Tensor | None:
        """Return a tensor cut as this state is here; None: it is equal on all ranks.

        Usually it is the parameter, for state with one element per parameter element.
        ``OwnedOptimizer`` says how its state is cut. With other optimizers, state that one rank had
        is equal on all ranks if its shape differs from the parameter's.

        Args:
            name, key: the parameter and the optimizer's name of the state.
            announced: the state to load.
            singles: see ``is_cut``.
        """
        shown, shape = self.shown[name], announced.shape
        if self._state_like is not None and shape is not None:
            like = self._state_like(self._param_of[name], key, shape)
            if like is not None:
                return like
        is_owned = announced.is_on_one_rank and shape != shown.shape
        is_cut_dtensor = announced.is_dtensor and not is_owned
        return (
            shown if is_cut(key, shape, shown.shape, singles, is_dtensor=is_cut_dtensor) else None
        )

    def device_of(self, name: str) -> torch.device:
        """Return the device on which the optimizer has the state of a parameter."""
        param = self._param_of[name]
        return torch.device("cpu") if id(param) in self._on_host else param.device

    @cached_property
    def _on_host(self) -> set[int]:
        return set(map(id, self._params_on_host()))

    @cached_property
    def _param_of(self) -> dict[str, Tensor]:
        pairs = zip(self._params, self._parts, strict=True)
        return {part.name: param for param, parts in pairs for part in parts}

    def by_group(self) -> Iterator[tuple[dict[str, Any], dict[int, list[str]]]]:
        """Yield each group, and for each of its parameters' numbers the names that it contains."""
        first = 0
        for group in self.groups:
            end = first + len(group["params"])
            yield group, {number: self._names_of(number) for number in range(first, end)}
            first = end

    def _names_of(self, number: int) -> list[str]:
        return [part.name for part in self._parts[number]]

    def by_name(self, saved: StateDict) -> dict[str, Kept]:
        """Return the state in ``saved`` by the model's parameter names, in the model's order.

        Ranks gather state in this order, and the order of their optimizers may differ.
        """
        state: Mapping[int, Kept] = saved["state"]
        singles = self.singles | one_for_many(
            (self._params[number].shape, key, value.shape)
            for number, kept in state.items()
            for key, value in kept.items()
            if isinstance(value, Tensor)
        )
        found: dict[str, Kept] = {}
        for number, kept in state.items():
            param = self._params[number]
            cut = {key for key in kept if is_cut_tensor(param, key, kept[key], singles)}
            for part in self._parts[number]:
                found[part.name] = {
                    key: part.show(value) if key in cut else value for key, value in kept.items()
                }
        return {name: found[name] for name in sorted(found, key=self._order.__getitem__)}

    def named_groups(self, saved: StateDict) -> list[dict[str, Any]]:
        """Return the groups of ``saved`` with parameter names instead of numbers."""
        return [
            {
                **group,
                "params": [one for number in group["params"] for one in self._names_of(number)],
            }
            for group in saved["param_groups"]
        ]

    def to_load(self, state: Mapping[str, Kept]) -> dict[int, Kept]:
        """Return ``state`` by number, as the optimizer loads it; the inverse of ``by_name``.

        Raises:
            ConfigError: if single values, such as step counts, differ within a flat parameter.
        """
        own = {}
        for number, parts in enumerate(self._parts):
            kept = [state.get(part.name) for part in parts]
            if any(one is not None for one in kept):
                first, param = kept[0], self._params[number]
                if first is not None and self._is_owned(param, first):
                    own[number] = first
                else:
                    own[number] = _joined(param, parts, kept)
        return own

    def _is_owned(self, param: Tensor, kept: Kept) -> bool:
        """Return whether owners have state of a parameter, see ``OwnedOptimizer``."""
        like = self._state_like
        tensors = ((key, value) for key, value in kept.items() if isinstance(value, Tensor))
        return like is not None and any(like(param, k, v.shape) is not None for k, v in tensors)


def _parts_of(tree: Tree, params: Sequence[Tensor], label: str) -> list[list[_Part]]:
    """Return the parts of each of ``params``."""
    found = {id(shown): [_Part(name, shown)] for name, shown in tree.named()}
    for held in tree.held.values():
        shown, front = tree.shown(held), held.bucket.front
        for part in found.get(id(shown), ()):
            if front is not None:
                offset = held.bucket.spec.pieces[held.number].offset
                in_front = part._replace(held=held, offset=offset)
                found.setdefault(id(front.param), []).append(in_front)
            elif shown is not held.param:
                found[id(held.param)] = [part._replace(held=held)]
    for number, param in enumerate(params):
        if id(param) not in found:
            raise ConfigError(
                f"{label}: its parameter number {number}, of shape {tuple(param.shape)}, is not in "
                f"the {type(tree.module).__name__}; pass the model that the optimizer steps, and "
                "build the optimizer after fully_shard"
            )
    return [found[id(param)] for param in params]


def _joined(param: Tensor, parts: list[_Part], kept: list[Kept | None]) -> Kept:
    """Return the state of ``param`` from that of its parts; zeros for a part that has none."""
    if parts[0].held is None and kept[0] is not None:
        return kept[0]  # ``param`` is a parameter of the model and has only one part
    keys = list(dict.fromkeys(key for one in kept if one is not None for key in one))
    joined: Kept = {}
    for key in keys:
        values = [None if one is None else one.get(key) for one in kept]
        like = next((value for value in values if value is not None), None)
        if not isinstance(like, DTensor):
            joined[key] = _same(key, parts, values)
            continue
        joined[key] = full = torch.zeros_like(param, dtype=like.dtype)
        for part, value in zip(parts, values, strict=True):
            if value is not None:
                part.put(value, full)
    return joined


def _same(key: str, parts: list[_Part], values: list[Any]) -> Any:
    first = values[0]
    others = [value for value in values if value is not first]
    if any(value is None or not _is_equal(value, first) for value in others):
        raise ConfigError(
            f"optimizer state {key!r} differs between {', '.join(part.name for part in parts)}, or "
            "some have none; one flat parameter holds them. Use use_orig_params=True"
        )
    return first


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)
