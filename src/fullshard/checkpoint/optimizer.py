"""State dicts of optimizers, by names of parameters.

    {"state": {"head.weight": {"step": ..., "exp_avg": ..., ...}, ...},
     "param_groups": [{"lr": ..., "params": ["head.weight", ...]}, ...]}

It is the form of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``, and that of
FSDP1's ``optim_state_dict``. State with an element for each of the parameter's lies as the
parameter does; anything else, such as a step count, is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.checkpoint.agreement import check_alike
from fullshard.checkpoint.pieces import ByParameters, by_parameters
from fullshard.checkpoint.source import Key, Source
from fullshard.checkpoint.tree import Tree, shown_sharded
from fullshard.errors import ConfigError
from fullshard.frontend.contexts import clean_name
from fullshard.optim.groups import options_of
from fullshard.optim.states import is_cut, one_for_many
from fullshard.optim.trial import singles_of
from fullshard.tensors import shown_like, taken_by

__all__ = [
    "full_optim_state_dict",
    "load_full_optim_state_dict",
    "load_optim_state",
    "load_sharded_optim_state_dict",
    "sharded_optim_state_dict",
]


def full_optim_state_dict(
    module: nn.Module, optimizer: Optimizer, *, rank0_only: bool = True, cpu: bool = True
) -> dict[str, Any]:
    """The state of ``optimizer`` with whole plain tensors, gathered one at a time.

    Args:
        module: the model whose parameters it steps, or a model around it.
        optimizer: of ``torch.optim``, or a ``ShardedOptimizer``.
        rank0_only: only the first rank gets it, the others an empty dictionary.
        cpu: on the CPU, not on the device.

    Raises:
        ConfigError: the optimizer has a parameter that is not in ``module``.
        ProtocolError: as for ``full_state_dict``.
    """
    what = "full_optim_state_dict"
    tree = Tree(module, what)
    is_given = not rank0_only or tree.is_first
    stepped = by_parameters(optimizer, tree)

    def full(value: Any) -> Any:
        whole = tree.full(value, first_only=rank0_only)
        return whole.cpu() if cpu and is_given and isinstance(whole, Tensor) else whole

    state = _by_name(tree, stepped, full, gathered_by=what, is_given=is_given)
    return state if is_given else {}


def sharded_optim_state_dict(
    module: nn.Module,
    optimizer: Optimizer,
    *,
    plain_shards: bool = False,
    whole_mesh: bool = False,
    template: bool = False,
) -> dict[str, Any]:
    """The state of ``optimizer`` as it is sharded; see ``sharded_state_dict``.

    Args:
        module: the model whose parameters it steps, or a model around it.
        optimizer: of ``torch.optim``, or a ``ShardedOptimizer``.
        plain_shards, whole_mesh: how tensors are placed.
        template: let trainable parameters that have no state yet have some, by a step on them with
            zero gradients and ``lr=0``: for ``torch.distributed.checkpoint.load``, which fills in
            what is there. With ``LoadPlanner`` those have none again that the file has none for.

    Raises:
        ConfigError, ProtocolError: as for ``full_optim_state_dict``.
    """
    tree = Tree(module, "sharded_optim_state_dict")
    if template:
        _make_state(optimizer)
    stepped = by_parameters(optimizer, tree)
    mesh = tree.mesh if whole_mesh else None
    with torch.no_grad():
        return _by_name(
            tree,
            stepped,
            lambda value: _own_count(shown_sharded(value, mesh, plain_shards=plain_shards)),
            gathered_by="sharded_optim_state_dict" if plain_shards else None,
            is_given=True,
        )


def _own_count(value: Any) -> Any:
    """A step count that does not go on counting."""
    is_count = isinstance(value, Tensor) and not isinstance(value, DTensor) and value.dim() == 0
    return value.clone() if is_count else value


def _by_name(
    tree: Tree,
    optimizer: Optimizer | ByParameters,
    show: Callable[[Any], Any],
    *,
    gathered_by: str | None,
    is_given: bool,
) -> dict[str, Any]:
    """The optimizer's own state dict with names for numbers; ``show`` turns values.

    It goes by the order of the model: optimizers of different ranks may have others. If ``show``
    gathers, for ``gathered_by``, ranks make sure first that all have the same to gather.
    """
    names = _names(tree, optimizer)
    own = optimizer.state_dict()
    state: dict[str, dict[str, Any]] = {}
    place = {name: i for i, (name, _) in enumerate(tree.named())}
    numbers = sorted(own["state"], key=lambda number: place[names[number]])
    if gathered_by is not None:
        spread = (
            (names[number], key)
            for number in numbers
            for key, value in own["state"][number].items()
            if isinstance(value, DTensor)
        )
        check_alike(gathered_by, tree, spread)
    for number in numbers:
        shown = {key: show(value) for key, value in own["state"][number].items()}
        if is_given:
            state[names[number]] = shown
    groups = [
        {**group, "params": [names[number] for number in group["params"]]}
        for group in own["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def _names(tree: Tree, optimizer: Optimizer | ByParameters) -> list[str]:
    """The name of each parameter of the optimizer, in its order."""
    name_of = {id(param): name for name, param in tree.named()}
    names: list[str] = []
    for param in _params(optimizer):
        name = name_of.get(id(param))
        if name is None:
            raise ConfigError(
                f"{type(optimizer).__name__}: its parameter number {len(names)}, of shape "
                f"{tuple(param.shape)}, is not in the {type(tree.module).__name__}; pass the "
                "model that the optimizer steps, and build the optimizer after fully_shard"
            )
        names.append(name)
    return names


def _params(optimizer: Optimizer | ByParameters) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def load_full_optim_state_dict(
    module: nn.Module,
    optimizer: Optimizer,
    state: Mapping[str, Any],
    *,
    broadcast_from_rank0: bool = False,
    strict: bool = True,
) -> None:
    """Load whole tensors into ``optimizer``: each rank takes its part. Any layout, any mesh.

    Args:
        module: the model whose parameters it steps, or a model around it.
        optimizer: of ``torch.optim``, or a ``ShardedOptimizer``; it need not have stepped.
        state: by name.
        broadcast_from_rank0: only the first rank has ``state``; tensors are sent one at a time.
        strict: refuse parameters of ``optimizer`` that are in no group of ``state``, and state of
            parameters that the model does not have.

    Raises:
        ConfigError: names, shapes or groups that do not fit; before anything was changed.
        ProtocolError: as for ``full_state_dict``.
    """
    what = "load_full_optim_state_dict"
    load_optim_state(module, optimizer, state, what, send=broadcast_from_rank0, strict=strict)


def load_sharded_optim_state_dict(
    module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], *, strict: bool = True
) -> None:
    """Load DTensors, placed as ours are or in another way, into ``optimizer``.

    Raises:
        ConfigError, ProtocolError: as for ``load_full_optim_state_dict``.
    """
    what = "load_sharded_optim_state_dict"
    load_optim_state(module, optimizer, state, what, spread=True, strict=strict)


@torch.no_grad()
def load_optim_state(
    module: nn.Module,
    optimizer: Optimizer,
    state: Mapping[str, Any],
    what: str,
    *,
    send: bool = False,
    spread: bool = False,
    strict: bool,
    all_params: bool = True,
) -> None:
    """Load ``state``; see ``load_full_optim_state_dict``.

    Args:
        send: only the first rank has it.
        spread: it holds DTensors.
        all_params: False leaves parameters that are in no group of ``state`` out of the groups.
    """
    tree = Tree(module, what)
    stepped = by_parameters(optimizer, tree)
    names = _names(tree, stepped)
    values: dict[Key, Any] = dict(_flat(state or {}))
    source = Source(values, mesh=tree.mesh if send else None, device=tree.device)
    groups: list[dict[str, Any]] = source.get("param_groups")
    loaded = _Loaded(what, tree, source, groups)
    if strict:
        loaded.check(names)
    own_groups = _numbered_groups(stepped, names, loaded, all_params=all_params)
    numbers = dict(zip(names, range(len(names)), strict=True))
    params = _params(stepped)
    needed = list(loaded.needed(names, params))
    for (name, key), param in needed:
        loaded.check_shape(name, key, param)
    if send or spread:
        check_alike(what, tree, (key for key, _ in needed if send or loaded.is_dtensor(key)))
    singles = singles_of(optimizer) | one_for_many(
        (param.shape, key[1], source.shape_of(key)) for key, param in needed
    )
    own_state: dict[int, dict[str, Any]] = {}
    for (name, key), param in needed:
        value, shape = source.get((name, key)), source.shape_of((name, key))
        is_dtensor = loaded.is_dtensor((name, key))
        if is_cut(key, shape, param.shape, singles, is_dtensor=is_dtensor):
            part = taken_by(param, value).clone()
            value = shown_like(param, part.to(param.device))
        elif isinstance(value, Tensor):
            value = value.clone()  # optimizers count steps in place
        own_state.setdefault(numbers[loaded.own_name[name]], {})[key] = value
    stepped.load_state_dict({"state": own_state, "param_groups": own_groups})


def _numbered_groups(
    optimizer: Optimizer | ByParameters,
    names: Sequence[str],
    loaded: _Loaded,
    *,
    all_params: bool,
) -> list[dict[str, Any]]:
    """The optimizer's groups as its own state dict has them, with the options that are loaded."""
    groups: list[dict[str, Any]] = []
    first = 0
    of_empty = loaded.options_of_empty()
    for group in optimizer.param_groups:
        end = first + len(group["params"])
        options = next(of_empty, {}) if end == first else loaded.options(names[first:end])
        params = [i for i in range(first, end) if all_params or names[i] in loaded.grouped]
        groups.append({**group, **options, "params": params})
        first = end
    return groups


def _flat(state: Mapping[str, Any]) -> Iterator[tuple[Key, Any]]:
    """``state`` by (name, key), and the groups."""
    for name, kept in state.get("state", {}).items():
        for key, value in kept.items():
            yield (clean_name(name), key), value
    yield (
        "param_groups",
        [
            {**group, "params": [clean_name(name) for name in group["params"]]}
            for group in state.get("param_groups", ())
        ],
    )


class _Loaded:
    """What is loaded, by the names that this model has for it."""

    def __init__(self, what: str, tree: Tree, source: Source, groups: list[dict[str, Any]]) -> None:
        self._what = what
        self._source = source
        self._groups = groups
        first_name = {id(param): name for name, param in tree.named()}
        own = tree.entries()
        self.own_name = {entry.name: first_name.get(id(entry.value), entry.name) for entry in own}
        self.grouped = {self._own(name) for group in groups for name in group["params"]}

    def _own(self, name: str) -> str:
        return self.own_name.get(name, name)

    def check(self, names: list[str]) -> None:
        """Refuse what one side lacks."""
        missing = [name for name in names if name not in self.grouped]
        unknown = sorted({str(k[0]) for k in self._keys() if k[0] not in self.own_name})
        if missing or unknown:
            raise ConfigError(
                f"{self._what}: the state does not fit the optimizer; parameters that it lacks: "
                f"{missing[:8]}, that the model lacks: {unknown[:8]}; pass strict=False to load "
                "what fits"
            )

    def options(self, names: Sequence[str]) -> dict[str, Any]:
        """Those of the group that has these parameters."""
        wanted = set(names)
        found = [
            options_of(group)
            for group in self._groups
            if wanted & {self._own(name) for name in group["params"]}
        ]
        if any(one != found[0] for one in found[1:]):
            raise ConfigError(
                f"{self._what}: parameters of one group, {names[:4]} and others, were in groups "
                "with different options; give the optimizer the groups that were saved"
            )
        return found[0] if found else {}

    def options_of_empty(self) -> Iterator[dict[str, Any]]:
        """Yield those of the groups without parameters, in their order."""
        return (options_of(group) for group in self._groups if not group["params"])

    def needed(
        self, names: list[str], params: list[Tensor]
    ) -> Iterator[tuple[tuple[str, str], Tensor]]:
        """What is to be loaded, in the order of the model; of tied names the last counts."""
        param_of = dict(zip(names, params, strict=True))
        place = {name: i for i, name in enumerate(self.own_name)}
        for key in sorted(self._keys(), key=lambda key: place.get(key[0], -1)):
            param = param_of.get(self._own(key[0]))
            if param is not None:
                yield key, param

    def check_shape(self, name: str, key: str, param: Tensor) -> None:
        """Refuse a DTensor, or what has more than one element, of another shape."""
        shape = self._source.shape_of((name, key))
        if shape is not None and shape != param.shape and self.is_dtensor((name, key)):
            raise ConfigError(
                f"{self._what}: state {key!r} of {name} is a DTensor of {tuple(shape)}, the "
                f"parameter is of {tuple(param.shape)}"
            )

    def is_dtensor(self, key: tuple[str, str]) -> bool:
        """Whether what is loaded is one."""
        return getattr(self._source.announced[key], "is_dtensor", False)

    def _keys(self) -> Iterator[tuple[str, str]]:
        for key in self._source.announced:
            if isinstance(key, tuple):
                yield key


def _make_state(optimizer: Optimizer) -> None:
    """Step on the trainable parameters without state, changing none."""
    params = _params(optimizer)
    fresh = {id(one) for one in params if one.requires_grad and not optimizer.state.get(one)}
    if not fresh:
        return
    grads = [param.grad for param in params]
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for param in params:
            own = torch.zeros_like(param, dtype=param.grad_dtype) if id(param) in fresh else None
            param.grad = own
        for group in optimizer.param_groups:
            if "lr" in group:
                rate = group["lr"]
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        optimizer.step()
    finally:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if "lr" in group:
                group["lr"] = rate
