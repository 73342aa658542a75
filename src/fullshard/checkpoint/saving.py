"""Write checkpoints: each rank its part, all files or none."""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard._version import __version__
from fullshard.checkpoint import datafile
from fullshard.checkpoint.collecting import Collected
from fullshard.checkpoint.folders import UNFINISHED, commit, make_folder, refuse_name
from fullshard.checkpoint.manifest import (
    Contents,
    FileInfo,
    Manifest,
    contents_from_json,
    contents_to_json,
    digest_of,
)
from fullshard.checkpoint.values import encode
from fullshard.comm.council import Council
from fullshard.errors import ArgumentTypeError, ConfigError


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
    saving = _Saving(path, council, extra, step)
    unfinished = Path(council.agree(lambda: saving.collect(model, optimizer), saving.begin))
    council.agree(
        lambda: saving.write(unfinished),
        lambda said: saving.finish(unfinished, said),
        undo=lambda: shutil.rmtree(unfinished, ignore_errors=True),
    )


class _Saving:
    """The parts of ``save``: what each rank does, and what the first one decides then."""

    def __init__(self, path: Path, council: Council, extra: Any, step: int) -> None:
        self._path = path
        self._council = council
        self._extra = extra
        self._step = step
        self._found = Collected(council.rank, council.world)

    def collect(self, model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
        if not isinstance(self._step, int) or isinstance(self._step, bool):
            raise ArgumentTypeError(f"step={self._step!r}: expected an int")
        self._found.add_model(model)
        if optimizer is not None:
            self._found.add_optimizer(model, optimizer)
        extra = json.dumps(encode(self._extra, "extra"), allow_nan=False)
        return {"step": self._step, "extra": digest_of(extra.encode())}

    def begin(self, said: list[dict[str, Any]]) -> str:
        """Make the folder to write to."""
        for rank, one in enumerate(said):
            apart = [key for key in one if one[key] != said[0][key]]
            if apart:
                raise ConfigError(
                    f"{apart[0]} of rank {rank} differs from rank 0's; give all ranks the same, "
                    "and what differs by rank under the rank's number"
                )
        refuse_name(self._path)
        if self._path.exists():
            raise ConfigError("there is something at this path; a checkpoint needs a new one")
        name = f"{UNFINISHED}{self._path.name}-{uuid.uuid4().hex[:8]}"
        make_folder(self._path.with_name(name))
        return str(self._path.with_name(name))

    def write(self, unfinished: Path) -> dict[str, Any]:
        name = f"rank-{self._council.rank:05d}.safetensors"
        nbytes, digest = datafile.write(unfinished / name, self._found.parts)
        key = shared(self._council, self._found)
        return {"name": name, "nbytes": nbytes, "digest": digest, "contents": key}

    def finish(self, unfinished: Path, said: list[dict[str, Any]]) -> None:
        """Write the manifest and give the folder its name."""
        contents, numbers = merged(self._council, [one["contents"] for one in said])
        manifest = Manifest(
            step=self._step,
            time=time.time(),
            versions={"fullshard": __version__, "torch": torch.__version__},
            contents=contents,
            files=[
                FileInfo(**{**one, "rank": rank, "contents": numbers[rank]})
                for rank, one in enumerate(said)
            ],
            extra=self._extra,
        )
        manifest.check()
        commit(unfinished, self._path, manifest)


def shared(council: Council, found: Collected) -> str:
    """Hand what a rank contributes to the first rank; return the key for ``merged``."""
    return council.share(json.dumps(contents_to_json(Contents(found.tensors, found.values))))


def merged(council: Council, keys: Sequence[str]) -> tuple[list[Contents], list[int]]:
    """Return the distinct contents of all ranks, and for each rank the number of its own.

    Extra state of a module that several ranks have is the first one's.
    """
    contents: list[Contents] = []
    numbers: dict[str, int] = {}
    for key in dict.fromkeys(keys):
        own = contents_from_json(json.loads(council.take(key)), len(keys))
        known = {name for one in contents for name in one.values["states"]}
        states = {name: state for name, state in own.values["states"].items() if name not in known}
        own = own._replace(values={**own.values, "states": states})
        if own not in contents:
            contents.append(own)
        numbers[key] = contents.index(own)
    return contents, [numbers[key] for key in keys]
