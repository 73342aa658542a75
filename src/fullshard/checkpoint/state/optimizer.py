"""Make and load full and sharded state dicts of optimizers, keyed by parameter names.

    {"state": {"head.weight": {"step": ..., "exp_avg": ..., ...}, ...},
     "param_groups": [{"lr": ..., "params": ["head.weight", ...]}, ...]}

``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` and FSDP1's
``optim_state_dict`` use the same format. State with one element per parameter element has the
placements of the parameter; any other state, such as a step count, is equal on all ranks. The state
of an ``OwnedOptimizer``, of any shape, is cut so that owners hold it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.checkpoint.state.agreement import Item, check_alike, items_of, refused_by_all
from fullshard.checkpoint.state.optimized import Kept, StateDict, Stepped
from fullshard.checkpoint.state.rows import Announced, Key, Row, Source, Tree, full, sharded
from fullshard.errors import ConfigError
from fullshard.optim.flat import one_for_many
from fullshard.optim.inner import Groups, numbered, options_of
from fullshard.optim.probe import unwrapped
from fullshard.tensors import shown_like, taken_by
from fullshard.tensors.form import clean_name


def full_optim_state_dict(
    module: nn.Module, optimizer: Optimizer, *, rank0_only: bool = True, cpu: bool = True
) -> dict[str, Any]:
    """Return the state of ``optimizer`` as full tensors, gathered one at a time; a collective.

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
        state: full tensors, as ``full_optim_state_dict`` returns them.
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
    may_be_empty: bool = True,
) -> dict[str, Any]:
    """Return the input of ``optimizer.load_state_dict``; see ``load_full_optim_state_dict``.

    Args:
        optimizer: an optimizer, or only its parameter groups.
        send: broadcast ``state`` from the first rank.
        spread: ``state`` holds DTensors.
        all_params: False: omit parameters that are in no group of ``state`` from the groups.
        may_be_empty: False: refuse a ``state`` without the key "state".
    """
    tree = Tree(module, what)
    stepped = Stepped(tree, optimizer)
    mesh = tree.mesh

    def find(source: Source) -> OptimStateToLoad:
        found = OptimStateToLoad(what, tree, stepped, source.announced, strict, all_params)
        found.check_shapes()
        return found

    with refused_by_all(what, mesh, sends=send):
        values: dict[Key, Any] = dict(_flat(state or {}, unwraps=stepped.unwraps))
        if not (send or may_be_empty or "state" in (state or {})):
            raise ConfigError(
                f'{what}: got a dictionary without "state"; expected what optim_state_dict returns'
            )
        if not send:
            source = Source(values, mesh=None, device=tree.device)
            found = find(source)
    if send:
        source = Source(values, mesh=mesh, device=tree.device)
        found = find(source)
    if send or spread:
        keys = (key for key in found.likes if send or source.announced[key].is_dtensor)
        check_alike(what, mesh, (Item(*key) for key in keys))
    return found.state_dict(source.get, copies=True)


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


class OptimStateToLoad:
    """The part of loaded state that an optimizer takes, under the names of this model.

    Args:
        what: the call, for messages.
        tree: the model.
        stepped: the parameters of the optimizer.
        announced: the state by (name, key), and under "param_groups" the groups.
        strict: refuse parameters that are in no loaded group, and state that the model lacks.
        all_params: as for ``optim_state_to_load``.

    Attributes:
        likes: by the keys to load, in an order equal on all ranks, a tensor that is cut as the
            state is here, see ``Stepped.like``.

    Raises:
        ConfigError: names or groups do not fit. Nothing is communicated.
    """

    def __init__(
        self,
        what: str,
        tree: Tree,
        stepped: Stepped,
        announced: Mapping[Key, Announced],
        strict: bool,
        all_params: bool = True,
    ) -> None:
        self._what = what
        self._stepped = stepped
        self._announced = announced
        self._groups: list[dict[str, Any]] = announced["param_groups"].value
        first_name = {id(param): name for name, param in tree.named()}
        self._own_name = {row.name: first_name.get(id(row.value), row.name) for row in tree.rows()}
        self._grouped = {self._own(name) for group in self._groups for name in group["params"]}
        keys = [key for key in announced if isinstance(key, tuple)]
        if strict:
            self._check({name for name, _ in keys})
        self._groups_to_load = self._regrouped(all_params=all_params)
        # In the order of the model, so that the last one of tied names wins.
        place = {name: at for at, name in enumerate(self._own_name)}
        shown = stepped.shown
        needed = [
            key
            for key in sorted(keys, key=lambda key: place.get(key[0], -1))
            if self._own(key[0]) in shown
        ]
        singles = stepped.singles | one_for_many(
            (shown[self._own(name)].shape, key, announced[name, key].shape) for name, key in needed
        )
        self.likes = {
            (name, key): stepped.like(self._own(name), key, announced[name, key], singles)
            for name, key in needed
        }

    def _own(self, name: str) -> str:
        return self._own_name.get(name, name)

    def _check(self, names: Iterable[str]) -> None:
        """Refuse names that the loaded groups or the model lack."""
        missing = [name for name in self._stepped.shown if name not in self._grouped]
        unknown = sorted(str(name) for name in names if name not in self._own_name)
        if missing or unknown:
            raise ConfigError(
                f"{self._what}: the state does not fit the optimizer; parameters that it lacks: "
                f"{missing[:8]}, that the model lacks: {unknown[:8]}; pass strict=False to load "
                "what fits"
            )

    def _regrouped(self, *, all_params: bool) -> list[dict[str, Any]]:
        """Return the optimizer's groups, with parameter numbers and with the loaded options."""
        groups: list[dict[str, Any]] = []
        of_empty = (options_of(group) for group in self._groups if not group["params"])
        for group, names_of in self._stepped.by_group():
            names = [name for names in names_of.values() for name in names]
            options = self._options(names) if names else next(of_empty, {})
            params = [
                n for n in names_of if all_params or not self._grouped.isdisjoint(names_of[n])
            ]
            for key, now in group.items():  # a rate on a device stays there
                if isinstance(now, Tensor) and isinstance(options.get(key), Tensor):
                    options[key] = options[key].to(now.device)
            groups.append({**group, **options, "params": params})
        return groups

    def _options(self, names: Sequence[str]) -> dict[str, Any]:
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

    def check_shapes(self) -> None:
        """Refuse DTensors whose shapes are not their parameters', as both are cut alike."""
        for (name, key), like in self.likes.items():
            announced = self._announced[name, key]
            if like is not None and announced.is_dtensor and announced.shape != like.shape:
                raise ConfigError(
                    f"{self._what}: state {key!r} of {name} is a DTensor of "
                    f"{tuple(announced.shape or ())}, the parameter is of {tuple(like.shape)}"
                )

    def state_dict(self, get: Callable[[Key], Any], *, copies: bool) -> dict[str, Any]:
        """Return the input of ``optimizer.load_state_dict``.

        Args:
            get: returns a value to load; DTensors that are cut otherwise are gathered.
            copies: False: the result may have the memory of the values.
        """
        own: dict[str, Kept] = {}
        for (name, key), like in self.likes.items():
            value, own_name = get((name, key)), self._own(name)
            if like is not None:
                part = taken_by(like, value).to(self._stepped.device_of(own_name), copy=copies)
                value = shown_like(like, part)
            elif isinstance(value, DTensor):
                value = value.full_tensor()
            elif isinstance(value, Tensor):
                value = value.clone()  # an optimizer would change the caller's step count in place
            own.setdefault(own_name, {})[key] = value
        return {"state": self._stepped.to_load(own), "param_groups": self._groups_to_load}


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
