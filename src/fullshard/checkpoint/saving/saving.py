"""Write checkpoints: each rank its part, all files or none."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fullshard._version import __version__
from fullshard.checkpoint.format import (
    AnyPlace,
    Contents,
    FileInfo,
    Manifest,
    decode,
    digest_of,
    encode,
    place_of,
)
from fullshard.checkpoint.saving.collect import Collected, collected
from fullshard.checkpoint.saving.pending import PendingSave, await_save
from fullshard.checkpoint.saving.replicas import refuse_apart, shared_digests
from fullshard.checkpoint.saving.write import CopyMemory, Pace, Writing
from fullshard.checkpoint.state import Tree
from fullshard.checkpoint.stores import Machines, SaveTarget, target_at
from fullshard.comm.consensus import Consensus
from fullshard.comm.text import listed
from fullshard.errors import (
    ArgumentTypeError,
    CheckpointError,
    ConfigError,
    TornStepError,
    UnsupportedError,
)

_SINGLES = "single values of the optimizer"
_OPTIONS = "options"
_SHARE = 0.06  # of a processor, for saves in the background


def save(
    path: AnyPlace,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Any = None,
    *,
    step: int,
    mode: str = "sync",
    budget_nbytes: int | None = None,
) -> PendingSave:
    """Write a checkpoint to the new folder or URL ``path``; all ranks must call this.

    Each rank writes one file with its part of the model and of the optimizer's state, to a folder
    that all ranks share. The folder appears under its name when everything is on the disk. Then
    its name is written to the file ``latest`` in the parent folder. In an object store, the
    checkpoint appears with its manifest, which is written last. Ranks talk through the store of the
    default process group.

    Args:
        path: a folder that does not exist, whose parent is made if need be; or a URL of an object
            store where no checkpoint is, such as "s3://bucket/run/step-000100".
        model: a model, sharded or not.
        optimizer: the optimizer that steps its parameters.
        extra: what else a run needs to go on: numbers, strings, None, bytes, small plain tensors
            and arrays, in lists, tuples and dictionaries; equal on all ranks.
        step: the number of the training step, for people and for ``latest``.
        mode: "sync": return when everything is on the disk. "async": write in the
            background. Parameters that the optimizer steps, and its state, are copied during the
            training; the next step of the optimizer waits for these copies. Everything else is
            copied before this returns.
        budget_nbytes: for "async", the host memory of this rank for copies. Tensors that do not
            fit are written without a copy, and the next step of the optimizer waits until they are
            written. None: as much as the rank writes.

    Returns:
        The save; with "async", ``wait`` waits for its end, and so do the next ``save`` or ``load``.
        If it fails, they raise why.

    Raises:
        ConfigError: something cannot be saved, or there is something at ``path``, or ranks hold
            plain parameters of one name with different values. Nothing changed.
        CheckpointError: a rank could not write; nothing is left behind.
        LostRankError: a rank ended or hangs; other checkpoints are as they were.
        TornStepError: an exception that was caught left a step of the optimizer on some rank: the
            weights are half-stepped, and the optimizer's state does not show it; nothing was
            written.
        ProtocolError: during a forward, a backward or ``unshard_params``; or other ranks do
            something else, and wait for this one.
        PeerError: a step of another rank failed, which so does not come to this.

    All ranks raise the same.
    """
    await_save()
    path = place_of(path)
    how = How(mode, budget_nbytes, CopyMemory(0 if mode == "sync" else budget_nbytes))
    consensus = Consensus(f"save to {path}", "save", "a checkpoint")
    return begin(consensus, target_at(path, consensus), model, optimizer, extra, step=step, how=how)


class How(NamedTuple):
    """The arguments ``mode`` and ``budget_nbytes`` of ``save``, and the memory for copies.

    Attributes:
        frozen: whether parameters that require no gradient are saved.
    """

    mode: str
    budget_nbytes: int | None
    memory: CopyMemory
    frozen: bool = True

    def check(self) -> None:
        """Raise ``ConfigError`` if they have no meaning."""
        if self.mode not in ("sync", "async"):
            raise ConfigError(f'mode={self.mode!r}: expected "sync" or "async"')
        size = self.budget_nbytes
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
            raise ConfigError(f"budget_nbytes={size!r}: expected a number of bytes, or None")
        if size is not None and self.mode == "sync":
            raise ConfigError(
                f'budget_nbytes={size}: only for mode="async"; nothing is copied here'
            )


def begin(
    consensus: Consensus,
    target: SaveTarget,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Any,
    *,
    step: int,
    how: How,
    after: Callable[[], None] | None = None,
) -> PendingSave:
    """Do the work of ``save``, and ``after`` it what else belongs to it, by ``consensus`` alone."""
    saving, pending = _Saving(target, consensus, step), PendingSave(target.path)
    is_sync = how.mode == "sync"

    def collect() -> dict[str, Any]:
        how.check()
        target.check()
        found = collected(consensus.rank, consensus.world, model, optimizer, frozen=how.frozen)
        said = saving.take(found, optimizer, extra, how)
        if not is_sync:
            pending.hold(saving.writing, model, saving.found.units, optimizer)
        return said

    try:
        name = consensus.agree(collect, saving.begin)
    except BaseException as error:
        pending.let_go()
        if isinstance(error, TornStepError):
            _tell_apart(consensus, model, optimizer)
        raise

    def rest() -> None:
        saving.write_all(name, Pace(1.0 if is_sync else _SHARE, consensus.limit_s / 4))
        if after is not None:
            after()

    if is_sync:
        rest()
    else:
        pending.run(saving.writing, rest)
    return pending


def save_collected(path: Path, collect: Callable[[], Collected], extra: Any, *, step: int) -> None:
    """Write a checkpoint of the parts that each rank has collected, to its machine's memory.

    Args:
        path: a folder that does not exist; that above it belongs to each machine alone.
        collect: returns what this rank contributes.
        extra, step: as for ``save``.

    Raises:
        CheckpointError, ConfigError, LostRankError: as ``save`` does.
    """
    consensus = Consensus(f"save to {path}", "save", "a checkpoint")
    target = target_at(path, consensus, Machines.seen(consensus, path.parent))
    saving = _Saving(target, consensus, step)
    how = How("sync", None, CopyMemory(0))
    name = consensus.agree(lambda: saving.take(collect(), None, extra, how), saving.begin)
    saving.write_all(name, Pace(1.0, 0.0))


class _Saving:
    """The steps of ``save`` on each rank, and the decisions of the first rank."""

    def __init__(self, target: SaveTarget, consensus: Consensus, step: int) -> None:
        self._target = target
        self._consensus = consensus
        self._extra: Any = None
        self._step = step
        self.found: Collected
        self.writing: Writing

    def take(
        self, found: Collected, optimizer: Optimizer | None, extra: Any, how: How
    ) -> dict[str, Any]:
        """Take what is to be written; return what ranks have to agree on."""
        if not isinstance(self._step, int) or isinstance(self._step, bool):
            raise ArgumentTypeError(f"step={self._step!r}: expected an int")
        self.found = found
        text = json.dumps(encode(extra, "extra"), allow_nan=False)
        self._extra = decode(json.loads(text))  # as it is now, whatever the caller does with it
        self.writing = self._writing(optimizer, how)
        return {
            "folder": self._target.path.name,
            "step": self._step,
            "mode": how.mode,
            "extra": digest_of(json.dumps(json.loads(text), sort_keys=True).encode()),
            _SINGLES: self._consensus.share(json.dumps([self.found.singles, self.found.options])),
        }

    def begin(self, said: list[dict[str, Any]]) -> str:
        """Make the place to write to; return the name of the save."""
        _check_singles(self._consensus, [one.pop(_SINGLES) for one in said])
        for rank, one in enumerate(said):
            apart = [key for key in one if one[key] != said[0][key]]
            if apart:
                raise ConfigError(
                    f"{apart[0]} of rank {rank} differs from rank 0's; give all ranks the same "
                    "value, such as a dictionary with a value for each rank's number"
                )
        return self._target.begin()

    def _writing(self, optimizer: Optimizer | None, how: How) -> Writing:
        """Return the writing of this rank's parts."""
        parts, params, replicas = self.found.parts, self.found.params, self.found.replicas
        waits = {*parts, *replicas}
        state: list[Tensor] = []
        if how.mode == "async":
            waits = {name for name in waits if name.startswith("optimizer/")}
            waits |= {f"model/{name}" for name in self.found.stepped}
            states = [] if optimizer is None else optimizer.state.values()
            state = [one for its in states for one in its.values() if isinstance(one, Tensor)]
        return Writing(parts, params, state, replicas=replicas, waits=waits, memory=how.memory)

    def write_all(self, name: str, pace: Pace) -> None:
        """Write the files of the save ``name``, copy them, and let the checkpoint appear."""

        def undo() -> None:
            if self._target.machines.is_first:
                self._target.undo(name)

        consensus, target = self._consensus, self._target

        def describe(said: list[dict[str, Any]]) -> str | None:
            replicas = [one.pop("replicas") for one in said]
            manifest = self._described(said).to_json()
            refuse_apart(consensus, replicas)
            if target.machines.total > 1:
                return manifest.decode()
            target.seal(name, manifest)
            target.appear(name, manifest)
            return None

        try:
            told = consensus.agree(lambda: self._write(name, pace), describe, undo)
            if told is None:
                return
            manifest = told.encode()
            target.copy(consensus, name, Manifest.from_json(manifest).files)
            first = target.machines.is_first
            consensus.agree(lambda: target.seal(name, manifest) if first else None, undo=undo)
            consensus.agree(lambda: target.appear(name, manifest) if first else None, undo=undo)
        except BaseException:
            undo()
            raise

    def _write(self, save: str, pace: Pace) -> dict[str, Any]:
        name = self._target.file_name(save, self._consensus.rank)
        nbytes, digest = self.writing.run(partial(self._target.writer, save, name), pace)
        tensors = self.found.tensors.items()
        plain = (key for key, one in tensors if key.startswith("model/") and not one.placements)
        digests = dict.fromkeys(plain, "") | self.writing.digests
        return {
            "name": name,
            "nbytes": nbytes,
            "digest": digest,
            "contents": shared(self._consensus, self.found),
            "replicas": shared_digests(self._consensus, digests),
        }

    def _described(self, said: list[dict[str, Any]]) -> Manifest:
        """Return the manifest of the files that all ranks have written."""
        manifest = merged(self._consensus, [one.pop("contents") for one in said])
        files = zip(manifest.files, said, strict=True)
        return replace(
            manifest,
            step=self._step,
            time=time.time(),
            versions={"fullshard": __version__, "torch": torch.__version__},
            files=[file._replace(**written) for file, written in files],
            extra=self._extra,
        )


def _check_singles(consensus: Consensus, keys: Sequence[str]) -> None:
    """Check that ranks that have the same parameter step it alike, with the same options.

    Raises:
        ConfigError: which step counts, other single values, or options differ.
    """
    ranks = {key: keys.index(key) for key in keys}
    found: dict[tuple[str, str], tuple[str, int]] = {}
    problems: dict[tuple[str, ...], str] = {}
    for shared_key, rank in ranks.items():
        singles, groups = json.loads(consensus.take(shared_key))
        options = ((name, _OPTIONS, text) for text, names in groups for name in names)
        for name, key, value in chain(singles, options):
            other, first = found.setdefault((name, key), (value, rank))
            if other != value and key == _OPTIONS:  # told once, for the first parameter
                theirs, ours = _apart(other, value)
                text = f"options of {name}: {theirs} on rank {first}, {ours} on {rank}"
                problems.setdefault((key, other, value), text)
            elif other != value:
                text = f"{key} of {name} is {other} on rank {first}, {value} on {rank}"
                problems[name, key, value] = text
    if problems:
        raise ConfigError(
            f"the optimizers of ranks differ: {listed(problems.values(), between='; ')}. All ranks "
            "must take the same steps with the same options; to make the optimizers equal, load "
            "one state dict on all ranks"
        )


def _apart(one: str, other: str) -> tuple[str, str]:
    """Return the options that differ, of two groups in JSON."""
    groups = json.loads(one), json.loads(other)
    keys = {**groups[0], **groups[1]}
    values = {key: [group.get(key, "absent") for group in groups] for key in keys}
    apart = {key: both for key, both in values.items() if both[0] != both[1]}
    first, second = (", ".join(f"{key}={both[n]}" for key, both in apart.items()) for n in (0, 1))
    return first, second


def _tell_apart(consensus: Consensus, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Tell how the ranks' states of the optimizer differ, if they do; no more is to be told then.

    Raises:
        ConfigError, CheckpointError: on all ranks, with the differences.
    """

    def own() -> list[str] | None:
        try:
            found = collected(consensus.rank, consensus.world, model, optimizer, complete=False)
            values = json.dumps([found.singles, found.options])
            return [consensus.share(values), shared(consensus, found)]
        except (ConfigError, UnsupportedError):
            return None  # of no interest here: nothing is saved

    def compare(said: list[list[str] | None]) -> None:
        known = [one for one in said if one is not None]
        if len(known) == len(said):
            _check_singles(consensus, [one[0] for one in known])
            merged(consensus, [one[1] for one in known])

    try:
        consensus.agree(own, compare)
    except (ConfigError, CheckpointError):
        Tree(model, "save").forget_interrupted()
        raise


def shared(consensus: Consensus, found: Collected) -> str:
    """Hand what a rank contributes to the first rank; return the key for ``merged``."""
    return consensus.share(json.dumps(Contents(found.tensors, found.values).to_json()))


def merged(consensus: Consensus, keys: Sequence[str]) -> Manifest:
    """Return the manifest of all ranks' tensors, before the data files are written.

    Extra state of a module that several ranks have is the first one's.

    Args:
        consensus: of all ranks.
        keys: what ``shared`` returned on each rank.

    Raises:
        CheckpointError: tensors are incomplete; the message names them and says why.
    """
    contents: list[Contents] = []
    numbers: dict[str, int] = {}
    for key in dict.fromkeys(keys):
        own = Contents.from_json(json.loads(consensus.take(key)), len(keys))
        known = {name for one in contents for name in one.values["states"]}
        states = {name: state for name, state in own.values["states"].items() if name not in known}
        own = own._replace(values={**own.values, "states": states})
        if own not in contents:
            contents.append(own)
        numbers[key] = contents.index(own)
    files = [FileInfo(f"rank-{at}", at, 0, "", numbers[key]) for at, key in enumerate(keys)]
    manifest = Manifest(0, 0.0, {}, contents, files, None)
    manifest.check()
    return manifest
