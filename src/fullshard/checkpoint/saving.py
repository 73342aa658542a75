"""Write checkpoints: each rank its part, all files or none."""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard import _torch
from fullshard.checkpoint import datafile
from fullshard.checkpoint.folders import UNFINISHED, commit
from fullshard.checkpoint.manifest import (
    Contents,
    Entry,
    FileInfo,
    Grid,
    Manifest,
    contents_from_json,
    contents_to_json,
    digest_of,
)
from fullshard.checkpoint.optimizer import sharded_optim_state_dict
from fullshard.checkpoint.tree import Tree, sharded
from fullshard.checkpoint.values import encode
from fullshard.comm.council import Council
from fullshard.errors import ArgumentTypeError, ConfigError, UnsupportedError


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Any = None,
    *,
    step: int,
) -> None:
    """Write a checkpoint to the new folder ``path``; all ranks must call this.

    Each rank writes one file with its part of the model and of the optimizer's state, to a folder
    that all ranks share. The folder appears under its name when everything is on the disk; then the
    file ``latest`` beside it names it. Ranks talk through the store of the default process group.

    Args:
        path: a folder that does not exist; its parent is made if need be.
        model: a model, sharded or not.
        optimizer: the optimizer that steps its parameters.
        extra: what else a run needs to go on: numbers, strings, None, bytes, small plain tensors
            and arrays, in lists, tuples and dictionaries; equal on all ranks.
        step: the number of the training step, for people and for ``latest``.

    Raises:
        ConfigError: something cannot be saved, or there is something at ``path``. Nothing changed.
        CheckpointError: a rank could not write; nothing is left behind.
        LostRankError: a rank ended or hangs; other checkpoints are as they were.
        ProtocolError: during a forward, a backward or ``unshard_params``.

        All ranks raise the same.
    """
    path = Path(path)
    council = Council(f"save to {path}")
    found = Collected(council.rank, council.world)

    def collect() -> Any:
        if not isinstance(step, int) or isinstance(step, bool):
            raise ArgumentTypeError(f"step={step!r}: expected an int")
        found.add_model(model)
        if optimizer is not None:
            found.add_optimizer(model, optimizer)
        added = json.dumps(encode(extra, "extra"), allow_nan=False)
        return {"extra": digest_of(added.encode()), "step": step}

    def begin(said: list[Any]) -> str:
        for rank, one in enumerate(said):
            if one != said[0]:
                what = "step" if one["step"] != said[0]["step"] else "extra"
                raise ConfigError(
                    f"{what} of rank {rank} differs from rank 0's; give all ranks the same, and "
                    "what differs by rank under the rank's number"
                )
        if path.exists():
            raise ConfigError("there is something at this path; a checkpoint needs a new one")
        unfinished = path.with_name(f"{UNFINISHED}{path.name}-{uuid.uuid4().hex[:8]}")
        unfinished.mkdir(parents=True)
        return str(unfinished)

    unfinished = Path(council.agree(collect, begin))

    def write() -> Any:
        info = found.write(unfinished, council)
        contents = contents_to_json(Contents(found.tensors, found.values))
        return {"file": info, "contents": council.share(json.dumps(contents))}

    def finish(said: list[Any]) -> None:
        number = {key: at for at, key in enumerate(dict.fromkeys(one["contents"] for one in said))}
        manifest = Manifest(
            step=step,
            time=time.time(),
            versions={"fullshard": version("fullshard"), "torch": torch.__version__},
            contents=[contents_from_json(json.loads(council.take(key))) for key in number],
            files=[FileInfo(**one["file"], contents=number[one["contents"]]) for one in said],
            extra=extra,
        )
        manifest.check()
        commit(unfinished, path, manifest)

    council.agree(write, finish, undo=lambda: shutil.rmtree(unfinished, ignore_errors=True))


class Collected:
    """What a rank contributes to a checkpoint.

    Attributes:
        tensors: the tensors of which this rank holds a part.
        parts: the parts that this rank writes.
        values: what the model and the optimizer have besides.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self.tensors: dict[str, Entry] = {}
        self.parts: dict[str, Tensor] = {}
        self.values: dict[str, Any] = {}
        self._everyone = Grid((world,), tuple(range(world)))
        self._num_taken = 0

    def add_model(self, model: nn.Module) -> None:
        """Add parameters, buffers and extra state of a model."""
        tree = Tree(model, "save")
        if tree.mesh is not None:
            self._everyone = grid_of(tree.mesh)
        ties: dict[str, str] = {}
        states: dict[str, Any] = {}
        first: dict[int, str] = {}
        alive = []  # so that no ``id`` comes twice
        rows = list(tree.rows())
        for row, (_, value) in zip(rows, sharded(rows, tree.mesh, plain_shards=False), strict=True):
            if not isinstance(value, Tensor):
                states[row.name] = encode(value, f"extra state {row.name}")
            elif id(row.value) in first:
                ties[row.name] = first[id(row.value)]
            else:
                first[id(row.value)] = row.name
                alive.append(row.value)
                self.add(f"model/{row.name}", value)
        self.values |= {"ties": ties, "states": states}

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
                    self.add(f"optimizer/{name}/{key}", value)
                else:
                    single[name][key] = encode(value, f"optimizer state {key!r} of {name}")
        groups = encode(state["param_groups"], "param_groups")
        self.values["optimizer"] = {"state": single, "param_groups": groups}

    def add(self, name: str, value: Tensor) -> None:
        """Add a tensor; a DTensor is one on all ranks of its mesh."""
        local, grid, placements = value, self._everyone, None
        if isinstance(value, DTensor):
            local, grid = _torch.local_of(value), grid_of(value.device_mesh)
            placements = tuple(value.placements)
            if any(one.is_partial() for one in placements):
                raise UnsupportedError(f"{name} is a partial sum; redistribute it first")
        if type(local.detach()) is not Tensor or local.is_meta or local.layout != torch.strided:
            kind = "on meta" if local.is_meta else f"a {type(local.detach()).__name__}"
            raise UnsupportedError(f"{name} is {kind}; only plain dense tensors can be saved")
        dtype = datafile.name_of(local.dtype, name)
        entry = Entry(dtype, tuple(value.shape), grid, placements, 0)
        if placements is not None:  # ranks that hold copies take turns
            entry = entry._replace(writer=self._num_taken % entry.num_copies)
            self._num_taken += 1
        # Plain tensors may differ, as statistics of batches do: all are the first rank's.
        self.tensors[name] = entry
        if local.numel() and entry.is_written_by(self._rank):
            self.parts[name] = local

    def write(self, folder: Path, council: Council) -> dict[str, Any]:
        """Write this rank's file; return the fields of its ``FileInfo`` without the contents."""
        name = f"rank-{council.rank:05d}.safetensors"
        nbytes, digest = datafile.write(folder / name, self.parts, council.beat)
        return {"name": name, "rank": council.rank, "nbytes": nbytes, "digest": digest}


def grid_of(mesh: DeviceMesh) -> Grid:
    """Return shape and ranks of a mesh."""
    return Grid(tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()))
