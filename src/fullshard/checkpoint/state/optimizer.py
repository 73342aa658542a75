"""Make and load full and sharded state dicts of optimizers, keyed by parameter names.

    {"state": {"head.weight": {"step": ..., "exp_avg": ..., ...}, ...},
     "param_groups": [{"lr": ..., "params": ["head.weight", ...]}, ...]}

``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` and FSDP1's
``optim_state_dict`` use the same format. State with one element per parameter element has the
placements of the parameter; any other state, such as a step count, is equal on all ranks. The state
of an ``OwnedOptimizer``, of any shape, is cut so that owners hold it whole.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.checkpoint.state.agreement import Item, check_alike, items_of, refused_by_all
from fullshard.checkpoint.state.optimized import Kept, StateDict, Stepped
from fullshard.checkpoint.state.rows import Key, Row, Source, Tree, full, sharded
from fullshard.errors import ConfigError
from fullshard.optim.flat import one_for_many
from fullshard.optim.inner import Groups, numbered, options_of
from fullshard.optim.probe import unwrapped
from fullshard.tensors import shown_like, taken_by
from fullshard.tensors.form import clean_name


def full_optim_state_dict(
    module: nn.Module, optimizer: Optimizer, *, rank0_only: bool = True, cpu: bool = True
) -> dict[str, Any]:
    """Return the state of ``optimizer`` as whole tensors, gathered one at a time; a collective.

    Args:
        module: the model whose parameters ``optimizer`` steps, or a model that contains it.
        optimizer: an optimizer of ``torch.optim``, or a ``ShardedOptimizer``.
        rank0_only: return the state on the first rank only, and {} on all other ranks.
        cpu: return tensors on the CPU instead of the device.

    Raises:
        ConfigError: a parameter is not in ``module``, or the parameters with state differ by rank.
        ProtocolError: as for ``full_state_dict``.
    """
    tree = Tree(module, "full_optim_state_dict")
    return full_optim_state(tree, optimizer, optimizer.state_dict(), rank0_only=rank0_only, cpu=cpu)


def full_optim_state(
    tree: Tree, optimizer: Optimizer, saved: StateDict, *, rank0_only: bool, cpu: bool
) -> dict[str, Any]:
    """Do the work of ``full_optim_state_dict`` for ``saved``, a state dict of ``optimizer``."""
    stepped, state = _on_all("full_optim_state_dict", tree, optimizer, saved)
    values = full(tree, list(_rows(state)), rank0_only=rank0_only, cpu=cpu)
    named = _by_names(stepped, saved, state, values)
    return named if not rank0_only or tree.is_first else {}


def sharded_optim_state_dict(
    module: nn.Module,
    optimizer: Optimizer,
    *,
    plain_shards: bool = False,
    whole_mesh: bool = False,
    template: bool = False,
) -> dict[str, Any]:
    """Return the state of ``optimizer`` by parameter name, as DTensors of this rank's shards.

    Args:
        module: the model whose parameters ``optimizer`` steps, or a model that contains it.
        optimizer: an optimizer of ``torch.optim``, or a ``ShardedOptimizer``.
        plain_shards, whole_mesh: the placements, as for ``sharded_state_dict``.
        template: first give state to trainable parameters that have none, by a step with zero
            gradients and ``lr=0``, since ``torch.distributed.checkpoint.load`` only overwrites
            existing state. ``LoadPlanner`` removes that of parameters without state in the file.

    Raises:
        ConfigError, ProtocolError: as for ``full_optim_state_dict``.
    """
    tree = Tree(module, "sharded_optim_state_dict")
    if template:
        _make_state(optimizer)
    saved = optimizer.state_dict()
    return sharded_optim_state(
        tree, optimizer, saved, plain_shards=plain_shards, whole_mesh=whole_mesh
    )


def sharded_optim_state(
    tree: Tree, optimizer: Optimizer, saved: StateDict, *, plain_shards: bool, whole_mesh: bool
) -> dict[str, Any]:
    """Do the work of ``sharded_optim_state_dict`` for ``saved``, a state dict of ``optimizer``."""
    if plain_shards:  # which gathers
        stepped, state = _on_all("sharded_optim_state_dict", tree, optimizer, saved)
    else:
        stepped = Stepped(tree, optimizer)
        state = stepped.by_name(saved)
    mesh = tree.mesh if whole_mesh else None
    with torch.no_grad():
        values = sharded(_rows(state), mesh, plain_shards=plain_shards)
        return _by_names(stepped, saved, state, values)


def _rows(state: Mapping[str, Kept]) -> Iterator[Row]:
    for name, kept in state.items():
        for key, value in kept.items():
            yield Row(name, value, key=key)


def _on_all(
    what: str, tree: Tree, optimizer: Optimizer, saved: StateDict
) -> tuple[Stepped, dict[str, Kept]]:
    """Return what ``optimizer`` steps, and ``saved`` by name, the same on all ranks; a collective.

    Raises:
        ConfigError: on all ranks, if a rank cannot, or if their state differs.
    """
    items: list[Item] = []
    failure = None
    try:
        stepped = Stepped(tree, optimizer)
        state = stepped.by_name(saved)
        items += items_of(state, stepped.shown)
    except Exception as error:  # the other ranks wait to hear of it
        failure = error
    check_alike(what, tree.mesh, items, failure, told=tree.forget_interrupted)
    return stepped, state


def _by_names(
    stepped: Stepped, saved: StateDict, state: Mapping[str, Kept], values: Iterable[tuple[Row, Any]]
) -> dict[str, Any]:
    """Return a state dict by parameter name, with the tensors of ``values``."""
    found: dict[str, Kept] = {name: {} for name in state}
    for row, value in values:
        is_count = isinstance(value, Tensor) and not isinstance(value, DTensor) and not value.dim()
        # A later step must not change the saved step count.
        found[row.name][row.key] = value.clone() if is_count else value
    return {"state": found, "param_groups": stepped.named_groups(saved)}


def load_full_optim_state_dict(
    module: nn.Module,
    optimizer: Optimizer,
    state: Mapping[str, Any],
    *,
    broadcast_from_rank0: bool = False,
    strict: bool = True,
) -> None:
    """Load full state into ``optimizer``; each rank takes its part, whatever the layout and mesh.

    Args:
        module: the model whose parameters ``optimizer`` steps, or a model that contains it.
        optimizer: of ``torch.optim``, or a ``ShardedOptimizer``; it need not have stepped yet.
        state: whole tensors, as ``full_optim_state_dict`` returns them.
        broadcast_from_rank0: as for ``load_full_state_dict``.
        strict: refuse parameters of ``optimizer`` that are in no group of ``state``, and state of
            parameters that the model does not have.

    Raises:
        ConfigError: if names, groups or shapes of DTensors do not fit; nothing was changed.
        ProtocolError: as for ``full_state_dict``.
    """
    what = "load_full_optim_state_dict"
    _load(module, optimizer, state, what, send=broadcast_from_rank0, strict=strict)


def load_sharded_optim_state_dict(
    module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], *, strict: bool = True
) -> None:
    """Load sharded state with any placements; see ``load_full_optim_state_dict``.

    Raises:
        ConfigError, ProtocolError: as for ``load_full_optim_state_dict``.
    """
    what = "load_sharded_optim_state_dict"
    _load(module, optimizer, state, what, spread=True, strict=strict)


@torch.no_grad()
def _load(
    module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], what: str, **how: bool
) -> None:
    optimizer.load_state_dict(optim_state_to_load(module, optimizer, state, what, **how))


@torch.no_grad()
def optim_state_to_load(
    module: nn.Module,
    optimizer: Optimizer | Groups,
    state: Mapping[str, Any],
    what: str,
    *,
    send: bool = False,
    spread: bool = False,
    strict: bool,
    all_params: bool = True,
    copies: bool = True,
    agrees: bool = True,
    may_be_empty: bool = True,
) -> dict[str, Any]:
    """Return the input of ``optimizer.load_state_dict``; see ``load_full_optim_state_dict``.

    Args:
        optimizer: an optimizer, or only its parameter groups.
        send: broadcast ``state`` from the first rank.
        spread: ``state`` holds DTensors.
        all_params: False: omit parameters that are in no group of ``state`` from the groups.
        copies: False: the result may have the memory of ``state``.
        agrees: False: the caller tells the other ranks of errors.
        may_be_empty: False: refuse a ``state`` without the key "state".
    """
    tree = Tree(module, what)
    stepped = Stepped(tree, optimizer)
    mesh = tree.mesh
    with refused_by_all(what, mesh if agrees else None, sends=send):
        values: dict[Key, Any] = dict(_flat(state or {}, unwraps=stepped.unwraps))
        if not (send or may_be_empty or "state" in (state or {})):
            raise ConfigError(
                f'{what}: got a dictionary without "state"; expected what optim_state_dict returns'
            )
        if not send:
            source = Source(values, mesh=None, device=tree.device)
            wanted = _wanted(what, tree, stepped, source, strict=strict, all_params=all_params)
    if send:
        source = Source(values, mesh=mesh, device=tree.device)
        wanted = _wanted(what, tree, stepped, source, strict=strict, all_params=all_params)
    loaded, needed, likes, groups = wanted
    if send or spread:
        keys = (key for key, _ in needed if send or loaded.is_dtensor(key))
        check_alike(what, mesh, (Item(*key) for key in keys))
    own: dict[str, dict[str, Any]] = {}
    for (name, key), _ in needed:
        value, like = source.get((name, key)), likes[name, key]
        if like is not None:
            part = taken_by(like, value)
            part = part.clone() if copies else part
            value = shown_like(like, part.to(stepped.device_of(name)))
        elif isinstance(value, DTensor):
            value = value.full_tensor()
        elif isinstance(value, Tensor):
            value = value.clone()  # an optimizer would change the caller's step count in place
        own.setdefault(loaded.own_name[name], {})[key] = value
    return {"state": stepped.to_load(own), "param_groups": groups}


class _Wanted(NamedTuple):
    """The part of the loaded state that this optimizer takes."""

    loaded: _Loaded
    needed: list[tuple[tuple[str, str], Tensor]]
    """Keys to load, with their parameters, see ``_Loaded.needed``."""
    likes: dict[tuple[str, str], Tensor | None]
    """Tensors that are cut as the state is here, by key, see ``_Loaded.like``."""
    groups: list[dict[str, Any]]


def _wanted(
    what: str,
    tree: Tree,
    stepped: Stepped,
    source: Source,
    *,
    strict: bool,
    all_params: bool,
) -> _Wanted:
    """Check what ``source`` holds; return what of it is needed. Nothing is communicated."""
    params = stepped.shown
    loaded = _Loaded(what, tree, source, source.get("param_groups"))
    if strict:
        loaded.check(params)
    groups = _groups_to_load(stepped, loaded, all_params=all_params)
    needed = list(loaded.needed(params))
    singles = stepped.singles | one_for_many(
        (param.shape, key[1], source.shape_of(key)) for key, param in needed
    )
    likes = {(name, key): loaded.like(stepped, name, key, singles) for (name, key), _ in needed}
    for (name, key), _ in needed:
        loaded.check_shape(name, key, likes[name, key])
    return _Wanted(loaded, needed, likes, groups)


def _groups_to_load(stepped: Stepped, loaded: _Loaded, *, all_params: bool) -> list[dict[str, Any]]:
    """Return the optimizer's groups, with parameter numbers and with the loaded options."""
    groups: list[dict[str, Any]] = []
    of_empty = loaded.options_of_empty()
    for group, names_of in stepped.by_group():
        names = [name for names in names_of.values() for name in names]
        options = loaded.options(names) if names else next(of_empty, {})
        params = [n for n in names_of if all_params or not loaded.grouped.isdisjoint(names_of[n])]
        groups.append({**group, **options, "params": params})
    return groups


def _flat(state: Mapping[str, Any], *, unwraps: bool) -> Iterator[tuple[Key, Any]]:
    """Yield the values of ``state`` by (name, key), and then the groups."""
    for name, kept in state.get("state", {}).items():
        for key, value in (unwrapped(kept) if unwraps else kept).items():
            yield (clean_name(name), key), value
    yield (
        "param_groups",
        [
            {**group, "params": [clean_name(name) for name in group["params"]]}
            for group in state.get("param_groups", ())
        ],
    )


class _Loaded:
    """The state to load, under the names of this model."""

    def __init__(self, what: str, tree: Tree, source: Source, groups: list[dict[str, Any]]) -> None:
        self._what = what
        self._source = source
        self._groups = groups
        first_name = {id(param): name for name, param in tree.named()}
        self.own_name = {row.name: first_name.get(id(row.value), row.name) for row in tree.rows()}
        self.grouped = {self._own(name) for group in groups for name in group["params"]}

    def _own(self, name: str) -> str:
        return self.own_name.get(name, name)

    def check(self, names: Iterable[str]) -> None:
        """Refuse names that the loaded groups or the model lack."""
        missing = [name for name in names if name not in self.grouped]
        unknown = sorted({str(k[0]) for k in self._keys() if k[0] not in self.own_name})
        if missing or unknown:
            raise ConfigError(
                f"{self._what}: the state does not fit the optimizer; parameters that it lacks: "
                f"{missing[:8]}, that the model lacks: {unknown[:8]}; pass strict=False to load "
                "what fits"
            )

    def options(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the loaded options of the parameters ``names``, which are in one group now."""
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
        """Yield the options of loaded groups without parameters, in order."""
        return (options_of(group) for group in self._groups if not group["params"])

    def needed(self, params: Mapping[str, Tensor]) -> Iterator[tuple[tuple[str, str], Tensor]]:
        """Yield keys to load, with their parameters, in model order; the last tied name wins."""
        place = {name: i for i, name in enumerate(self.own_name)}
        for key in sorted(self._keys(), key=lambda key: place.get(key[0], -1)):
            param = params.get(self._own(key[0]))
            if param is not None:
                yield key, param

    def like(self, stepped: Stepped, name: str, key: str, singles: Container[str]) -> Tensor | None:
        """Return a tensor cut as this state is here, see ``Stepped.like``."""
        announced = self._source.announced[name, key]
        return stepped.like(
            self._own(name),
            key,
            self._source.shape_of((name, key)),
            singles,
            is_dtensor=self.is_dtensor((name, key)),
            is_on_one_rank=getattr(announced, "is_on_one_rank", False),
        )

    def check_shape(self, name: str, key: str, like: Tensor | None) -> None:
        """Refuse a DTensor whose shape is not its parameter's, as both are cut alike."""
        shape = self._source.shape_of((name, key))
        if like is not None and shape != like.shape and self.is_dtensor((name, key)):
            raise ConfigError(
                f"{self._what}: state {key!r} of {name} is a DTensor of {tuple(shape or ())}, the "
                f"parameter is of {tuple(like.shape)}"
            )

    def is_dtensor(self, key: tuple[str, str]) -> bool:
        """Return whether the loaded value is a DTensor."""
        return getattr(self._source.announced[key], "is_dtensor", False)

    def _keys(self) -> Iterator[tuple[str, str]]:
        for key in self._source.announced:
            if isinstance(key, tuple):
                yield key


def _make_state(optimizer: Optimizer) -> None:
    """Step with zero gradients where trainable parameters lack state; no parameter changes."""
    params = [param for _, param in numbered(optimizer.param_groups)]
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
