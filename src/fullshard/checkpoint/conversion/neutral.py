"""A checkpoint independent of formats: full tensors by name, and other values."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fullshard.checkpoint.conversion.torch_files import Leaf
from fullshard.checkpoint.format import decode, digest_of, flat_bytes, memory_of
from fullshard.checkpoint.state import EXTRA_STATE
from fullshard.errors import ConfigError, UnsupportedError
from fullshard.tensors.form import clean_name

_MODELS = ("model", "state_dict", "model_state_dict", "module")
_STEPS = ("step", "global_step")
_BESIDE = ("train_state", "lr_scheduler", "dataloader")
"""Keys under which torchtitan stores everything else, next to the model's tensors."""
EXTRA = "fullshard_extra"
"""Key of ``extra``, as text, in files for PyTorch; its folders allow fewer kinds of keys."""


@dataclass
class FullCheckpoint:
    """A checkpoint in no format.

    Attributes:
        model, optimizer: tensors by name, and state of the optimizer as "NAME/KEY".
        ties: names of tied parameters, and those under which they are kept.
        states: extra state of modules.
        left_out: frozen parameters that were not saved.
        single: state of the optimizer that is no tensor.
        groups: the groups of the optimizer, with names of parameters; None: it has no optimizer.
        extra: everything else.
    """

    step: int = 0
    model: dict[str, Leaf] = field(default_factory=dict)
    optimizer: dict[str, Leaf] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    single: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] | None = None
    extra: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(leaf.nbytes for leaf in self.leaves.values())

    def tie(self) -> None:
        """Keep parameters that are the same as others only once.

        A folder of PyTorch has tied parameters twice, without a mark. A parameter counts as tied
        if it equals another parameter, its values are not all the same, and it is not stepped.
        """
        stepped = {name for group in self.groups or () for name in group["params"]}
        kinds = Counter((leaf.dtype, leaf.shape) for leaf in self.model.values())
        free = {(one.dtype, one.shape) for name, one in self.model.items() if name not in stepped}
        first: dict[Any, str] = {}
        for name in sorted(self.model, key=lambda one: one not in stepped):
            leaf = self.model[name]
            key, kind = leaf.memory, (leaf.dtype, leaf.shape)
            if key is None and len(leaf.shape) > 1 and kinds[kind] > 1 and kind in free:
                key = _digest_of(leaf)
            if key is None or first.setdefault(key, name) == name:
                continue
            if leaf.memory is not None or name not in stepped:
                self.ties[name] = first[key]
                del self.model[name]

    @property
    def leaves(self) -> dict[str, Leaf]:
        """All tensors by the names that they have in files."""
        model = {f"model/{name}": leaf for name, leaf in self.model.items()}
        return model | {f"optimizer/{name}": leaf for name, leaf in self.optimizer.items()}


def full_state_of(tree: dict[str, Any], leave_out: Collection[str], where: str) -> FullCheckpoint:
    """Return what a file or folder of PyTorch holds.

    Args:
        tree: what ``tree_of`` returned.
        leave_out: keys of the tree to leave out.
        where: its path, for messages.

    Raises:
        ConfigError: a key to leave out is not there, or which one the model is cannot be told.
        UnsupportedError: it has several optimizers, or one that goes by numbers.
    """
    unknown = sorted(set(leave_out) - tree.keys())
    if unknown:
        raise ConfigError(f"{where} has no {', '.join(unknown)}; it has {', '.join([*tree][:16])}")
    tree = {key: value for key, value in tree.items() if key not in leave_out}
    found = FullCheckpoint()
    optimizers = [key for key, value in tree.items() if _is_optimizer(value)]
    if len(optimizers) > 1:
        raise UnsupportedError(
            f"{where} has several optimizers, {', '.join(optimizers)}; leave all out but one"
        )
    for key in optimizers:
        _add_optimizer(found, tree.pop(key), f"{where}: {key}")
    models = [key for key in _MODELS if _has_leaves(tree.get(key))]
    beside = {key: value for key, value in tree.items() if _is_beside(key, value)}
    rest = {key: value for key, value in tree.items() if key not in beside}
    is_model = not models and any(isinstance(value, Leaf) for value in rest.values())
    models = models or [key for key, value in rest.items() if _has_leaves(value)]
    if _is_optimizer(rest):
        is_model, models, optimizers = False, [], [where]
    if is_model:
        model, extra = rest, beside
    elif len(models) == 1:
        model, extra = tree.pop(models[0]), tree
    else:
        raise ConfigError(_why_no_model(where, models, optimizers, [*tree]))
    for full, value in _named(model):
        name = clean_name(full)
        if name in found.model or name in found.states:
            raise ConfigError(f"{where} has two tensors that are {name} without prefixes")
        if isinstance(value, Leaf) and not name.endswith(EXTRA_STATE):
            found.model[name] = value
        else:
            found.states[name] = _plain(value)
    extra = _plain(extra)
    places = (extra, *(extra[key] for key in _BESIDE if isinstance(extra.get(key), Mapping)))
    steps = [int(one[key]) for one in places for key in _STEPS if _is_number(one.get(key))]
    found.step = steps[0] if steps else 0
    text = extra.get(EXTRA)  # as we write it
    found.extra = decode(json.loads(text)) if isinstance(text, str) else extra or None
    return found


def _is_beside(key: Any, value: Any) -> bool:
    """Return whether an entry on top is of the training, even if all others are the model."""
    return (key in _BESIDE and isinstance(value, Mapping)) or (key in _STEPS and type(value) is int)


def _why_no_model(where: str, models: list[str], optimizers: list[str], keys: list[str]) -> str:
    """Return why ``where`` has no model to convert, with the keys that it has instead."""
    if models:
        return (
            f"{where} has no model that can be told from the rest: the keys "
            f"{', '.join(map(str, models[:16]))} hold tensors; leave out all but one of them"
        )
    needed = "a checkpoint needs a model, with or without an optimizer"
    if optimizers == [where]:
        return f"{where} is the state of an optimizer alone: {needed}"
    if optimizers:
        return f"{where} has an optimizer, {optimizers[0]}, and no model: {needed}"
    found = f", its keys are {', '.join(map(str, keys[:16]))}" if keys else ", it is empty"
    return f"{where} has no model{found}: {needed}"


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_floating_point() and not value.is_complex()
    return type(value) is int


def _is_optimizer(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    is_flat = any(isinstance(key, str) and key.startswith("param_groups.") for key in value)
    return "param_groups" in value or is_flat


def _has_leaves(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(one, Leaf) for _, one in _named(value))


def _named(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and not str(key).endswith(EXTRA_STATE):
            yield from _named(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _plain(value: Any) -> Any:
    """Return ``value`` with tensors instead of leaves."""
    if isinstance(value, Leaf):
        return value.read()
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [*map(_plain, value)] if isinstance(value, list) else value


def _add_optimizer(found: FullCheckpoint, stored: Mapping[str, Any], where: str) -> None:
    state, groups = stored.get("state", {}), stored.get("param_groups")
    if groups is None:
        state, groups = _unflattened(stored)
    params = [name for group in groups for name in group["params"]]
    by_number = isinstance(state, list) or any(str(name).isdigit() for name in (*state, *params))
    if by_number or any(not isinstance(name, str) for name in params):
        raise UnsupportedError(
            f"{where} goes by numbers of parameters, which do not say which they are; save it with "
            "get_optimizer_state_dict of torch.distributed.checkpoint.state_dict, or leave it out"
        )
    for name, kept in state.items():
        own = clean_name(name)
        found.single[own] = {}
        for key, value in kept.items():
            if isinstance(value, Leaf):
                found.optimizer[f"{own}/{key}"] = value
            else:
                found.single[own][key] = _plain(value)
    found.groups = [
        {**_plain(group), "params": [clean_name(name) for name in group["params"]]}
        for group in groups
    ]


def _unflattened(stored: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return state and groups of a state dict made with ``flatten_optimizer_state_dict``."""
    state: dict[str, Any] = {}
    options: dict[str, dict[str, Any]] = {}
    for full, value in stored.items():
        kind, _, rest = full.partition(".")
        name, _, key = rest.rpartition(".")
        (state if kind == "state" else options).setdefault(name, {})[key] = value
    groups: list[dict[str, Any]] = []
    for name, own in options.items():
        equal = next((one for one in groups if {**one, "params": 0} == {**own, "params": 0}), None)
        if equal is None:
            groups.append({**own, "params": [name]})
        else:
            equal["params"].append(name)
    return state, groups


def _digest_of(leaf: Leaf) -> str | None:
    """Return a digest of a tensor, None if all of its elements are equal."""
    tensor = leaf.read()
    flat = flat_bytes(tensor)
    if torch.equal(flat[tensor.itemsize :], flat[: -tensor.itemsize]):
        return None
    return digest_of(memory_of(flat))
