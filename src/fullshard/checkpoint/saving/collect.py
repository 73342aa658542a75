"""Collect what a rank contributes to a checkpoint."""

from __future__ import annotations

import copy
import json
import weakref
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard._torch import dtensor as _dtensor
from fullshard.checkpoint.format import Grid, TensorEntry, datafile, encode
from fullshard.checkpoint.state import (
    Item,
    Tree,
    sharded,
    sharded_optim_state_dict,
    singles_of,
)
from fullshard.comm.text import listed
from fullshard.engine import Unit
from fullshard.errors import CheckpointError, UnsupportedError
from fullshard.optim.inner import options_of


class Collected:
    """The contribution of a rank to a checkpoint.

    Attributes:
        tensors: the tensors of which this rank holds a part.
        held: this rank's parts of them.
        parts: those of these that this rank writes.
        replicas: plain parameters that several ranks hold, and their optimizer state; equal there.
        params: the parameters and buffers of which these are parts, by the same names.
        values: values of the model and the optimizer that are no tensors.
        stepped: names of the parameters that the optimizer steps.
        singles: the optimizer's single values, such as step counts, of parameters that are cut.
        options: of the optimizer's groups, in JSON, each with the names of the parameters.
        units: the units of the model.
        device: where the model computes.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self.tensors: dict[str, TensorEntry] = {}
        self.held: dict[str, Tensor] = {}
        self.parts: dict[str, Tensor] = {}
        self.replicas: dict[str, Tensor] = {}
        self.params: dict[str, Tensor] = {}
        self.values: dict[str, Any] = {}
        self.stepped: set[str] = set()
        self.singles: list[Item] = []
        self.options: list[tuple[str, list[str]]] = []
        self.units: list[Unit] = []
        self.device = torch.device("cpu")
        self._everyone = Grid((world,), tuple(range(world)))

    def add_model(self, model: nn.Module, *, complete: bool = True, frozen: bool = True) -> None:
        """Add parameters (``frozen`` ones if asked), buffers and extra state of a model.

        Raises:
            TornStepError: an exception that was caught left the weights half-stepped, and they
                must be ``complete``.
        """
        tree = Tree(model, "save")
        if complete:
            tree.check_complete("save")
        self.units, self.device = tree.units, tree.device
        if tree.mesh is not None:
            self._everyone = grid_of(tree.mesh)
        ties: dict[str, str] = {}
        states: dict[str, Any] = {}
        first: dict[int, str] = {}
        left_out: list[str] = []
        rows = list(tree.rows())
        for row, (_, value) in zip(rows, sharded(rows, tree.mesh, plain_shards=False), strict=True):
            own = row.value if row.held is None else row.held.param
            if row.is_free:
                states[row.name] = encode(value, f"extra state {row.name}")
            elif id(row.value) in first:
                ties[row.name] = first[id(row.value)]
            elif not frozen and isinstance(own, nn.Parameter) and not own.requires_grad:
                left_out.append(row.name)
            else:
                first[id(row.value)] = row.name
                is_replica = isinstance(row.value, nn.Parameter)
                self.add(f"model/{row.name}", value, is_replica=is_replica)
                self.params[f"model/{row.name}"] = own
        self.values |= {"ties": ties, "states": states}
        if left_out:
            self.values["left_out"] = left_out

    def add_optimizer(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Add the state and the options of an optimizer."""
        state = sharded_optim_state_dict(model, optimizer, whole_mesh=True)
        single: dict[str, dict[str, Any]] = {}
        for name, kept in state["state"].items():
            single[name] = {}
            for key, value in kept.items():
                if not isinstance(key, str) or "/" in key:
                    raise UnsupportedError(
                        f"optimizer state {key!r} of {name}: expected a name without a slash"
                    )
                if isinstance(value, Tensor):
                    is_replica = f"model/{name}" in self.replicas
                    self.add(f"optimizer/{name}/{key}", value, is_replica=is_replica)
                else:
                    single[name][key] = encode(value, f"optimizer state {key!r} of {name}")
        spread = (name for name, kept in state["state"].items() if self._is_cut(name, kept))
        self.singles = list(singles_of({name: state["state"][name] for name in spread}))
        self.stepped = {name for group in state["param_groups"] for name in group["params"]}
        groups = encode(state["param_groups"], "param_groups")
        self.options = [
            (json.dumps(encode(options_of(group), "param_groups"), sort_keys=True), group["params"])
            for group in state["param_groups"]
        ]
        self.values["optimizer"] = {"state": single, "param_groups": groups}

    def _is_cut(self, name: str, kept: Mapping[str, Any]) -> bool:
        entry = self.tensors.get(f"model/{name}")
        is_cut = entry is not None and entry.placements is not None
        return is_cut or any(isinstance(value, DTensor) for value in kept.values())

    def add(self, name: str, value: Tensor, *, is_replica: bool = False) -> None:
        """Add a tensor; a DTensor is one on all ranks of its mesh.

        Args:
            name: in the checkpoint.
            value: what this rank has of it.
            is_replica: whether a plain tensor has to be equal on all ranks. Buffers may differ, as
                statistics of batches do; the first rank's are saved.
        """
        local, grid, placements = value, self._everyone, None
        if isinstance(value, DTensor):
            local, grid = _dtensor.local_of(value), grid_of(value.device_mesh)
            placements = tuple(value.placements)
            if any(one.is_partial() for one in placements):
                raise UnsupportedError(f"{name} is a partial sum; redistribute it first")
        if type(local.detach()) is not Tensor or local.is_meta or local.layout != torch.strided:
            kind = "on meta" if local.is_meta else f"a {type(local.detach()).__name__}"
            raise UnsupportedError(f"{name} is {kind}; only plain dense tensors can be saved")
        dtype = datafile.name_of(local.dtype, name)
        entry = TensorEntry(dtype, tuple(value.shape), grid, placements, 0)
        if placements is not None:  # ranks that hold copies take turns
            entry = entry._replace(writer=zlib.crc32(name.encode()) % entry.num_copies)
            held = entry.region(self._rank).numel
            if local.numel() != held:
                raise UnsupportedError(
                    f"{name} has {local.numel()} elements on rank {self._rank}, its placements "
                    f"say {held}; cut it as torch.distributed.tensor does"
                )
        self._put(name, entry, local.detach(), is_replica=is_replica and placements is None)

    def _put(self, name: str, entry: TensorEntry, local: Tensor, *, is_replica: bool) -> None:
        self.tensors[name], self.held[name] = entry, local
        if is_replica and local.numel() and entry.num_copies > 1:
            self.replicas[name] = local
        if local.numel() and entry.is_written_by(self._rank):
            self.parts[name] = local

    def bare(self) -> Collected:
        """Return the same without what holds meshes and process groups."""
        bare = copy.copy(self)
        bare.params, bare.units = {}, []
        return bare

    def left_to(self, numbers: Mapping[int, int]) -> Collected:
        """Return the contribution of this rank if only some ranks remain.

        Args:
            numbers: for each of these ranks its new number.

        Raises:
            CheckpointError: none of them has some part of a tensor.
        """
        left = Collected(numbers[self._rank], len(numbers))
        left.values, left.singles, left.options = self.values, self.singles, self.options
        lost = []
        for name, local in self.held.items():
            entry = self.tensors[name].left_to(numbers)
            if entry is None:
                lost.append(name)
            else:
                left._put(name, entry, local, is_replica=name in self.replicas)
        if lost:
            raise CheckpointError(f"no remaining rank has all of {listed(lost)}")
        return left


def collected(
    rank: int,
    world: int,
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    complete: bool = True,
    frozen: bool = True,
) -> Collected:
    """Return what this rank has of a model, and of an optimizer that steps its parameters."""
    found = Collected(rank, world)
    found.add_model(model, complete=complete, frozen=frozen)
    if optimizer is not None:
        found.add_optimizer(model, optimizer)
    return found


# PyTorch computes the ranks of a mesh at every access. Meshes hold process groups, so weakly.
_grids: weakref.WeakKeyDictionary[DeviceMesh, Grid] = weakref.WeakKeyDictionary()


def grid_of(mesh: DeviceMesh) -> Grid:
    """Return shape and ranks of a mesh."""
    if mesh not in _grids:
        _grids[mesh] = Grid(tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()))
    return _grids[mesh]
