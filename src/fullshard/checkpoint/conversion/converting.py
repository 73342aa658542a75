"""Convert checkpoints from and to the formats of PyTorch."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullshard._version import __version__
from fullshard.checkpoint.conversion.compare import full_tensor_in
from fullshard.checkpoint.conversion.neutral import EXTRA, FullCheckpoint, full_state_of
from fullshard.checkpoint.conversion.torch_files import Leaf, is_folder, tree_of
from fullshard.checkpoint.format import (
    CHUNK_NBYTES,
    MANIFEST,
    Contents,
    DataWriter,
    FileInfo,
    Grid,
    Manifest,
    TensorEntry,
    decode,
    dtype_of,
    encode,
    flat_bytes,
    flush_folder,
    folder_of,
    make_folder,
    name_of,
    publish,
    read_manifest,
    refuse_name,
    seal,
    unfinished_at,
)
from fullshard.errors import CheckpointError, ConfigError
from fullshard.layout import round_up
from fullshard.progress import Operation


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str = "fullshard",
    step: int | None = None,
    leave_out: Collection[str] = (),
) -> None:
    """Write the checkpoint ``source`` in another format to ``target``; for one process.

    One tensor at a time is in memory. For PyTorch's formats, all tensors are also in a temporary
    file in the folder of ``target``. No file that is read can run code.

    Args:
        source: a checkpoint of fullshard, a folder of ``torch.distributed.checkpoint``, or a file
            of ``torch.save``. The file holds a state dict, or a dictionary that contains one. Such
            a dictionary may also contain an optimizer's state by names of parameters. Its other
            entries become ``extra``.
        target: a path where nothing is.
        to: "fullshard"; "dcp": what ``torch.distributed.checkpoint`` reads; "torch": a file. In
            the last two "model" and "optim" are as ``get_state_dict`` of PyTorch returns them.
        step: the step of the training; None: what ``source`` says, 0 if it says nothing.
        leave_out: keys of ``source``, a file or folder of PyTorch, that are not converted.

    Raises:
        ConfigError: the arguments do not fit the source. Nothing was written.
        CheckpointError: ``source`` is damaged, or ``target`` cannot be written.
        UnsupportedError: ``source`` holds something that the other format cannot.
    """
    source, target = folder_of(source), folder_of(target)
    if to not in _WRITERS:
        raise ConfigError(f"to={to!r}: expected one of {', '.join(_WRITERS)}")
    refuse_name(target)
    if target.exists():
        raise ConfigError(f"{target}: there is something at this path; give a new one")
    if not source.exists():
        raise ConfigError(f"{source}: there is nothing at this path")
    if (source / MANIFEST).is_file():
        if leave_out:
            raise ConfigError(f"{source} is a checkpoint of fullshard; leave_out is for PyTorch's")
        found = _of_ours(source)
    elif source.is_dir() and not is_folder(source):
        raise ConfigError(f"{source}: no checkpoint of fullshard or PyTorch is in this folder")
    else:
        found = full_state_of(tree_of(source), leave_out, str(source))
    found.step = found.step if step is None else step
    if to == "fullshard":
        found.tie()
    work = Operation(f"converting {source.name}", found.nbytes)
    try:
        with _appearing(target) as unfinished:
            _WRITERS[to](found, unfinished, work.add)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written ({error})") from error


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """Give a path to write to, which becomes ``target`` in the end, or is removed."""
    if not target.parent.exists():
        make_folder(target.parent)
    unfinished = unfinished_at(target)
    try:
        yield unfinished
        if (unfinished / MANIFEST).exists():
            publish(unfinished, target)
        else:
            unfinished.rename(target)
            flush_folder(target.parent)
    finally:
        if unfinished.is_dir():
            shutil.rmtree(unfinished, ignore_errors=True)
        else:
            unfinished.unlink(missing_ok=True)


def _of_ours(path: Path) -> FullCheckpoint:
    manifest = read_manifest(path)
    found = FullCheckpoint(step=manifest.step, extra=manifest.extra)
    for name in manifest.names():
        entry = manifest.entry(name)
        kind, _, rest = name.partition("/")

        def read(name: str = name, shape: tuple[int, ...] = entry.shape) -> Tensor:
            return full_tensor_in(path, manifest, name).view(shape)

        leaf = Leaf(dtype_of(entry.dtype), entry.shape, None, read)
        (found.model if kind == "model" else found.optimizer)[rest] = leaf
    found.ties = manifest.values("ties")
    found.states = {name: decode(state) for name, state in manifest.values("states").items()}
    left_out: dict[str, None] = {}
    groups: list[Any] = []  # contents of ranks may differ, and have equal groups
    for contents in manifest.contents:
        left_out |= dict.fromkeys(contents.values.get("left_out", []))
        if (stored := contents.values.get("optimizer")) is not None:
            found.single |= {name: decode(state) for name, state in stored["state"].items()}
            if stored["param_groups"] not in groups:
                groups.append(stored["param_groups"])
                found.groups = (found.groups or []) + decode(stored["param_groups"])
    found.left_out = list(left_out)
    return found


def _write_ours(found: FullCheckpoint, unfinished: Path, more: Callable[[int], None]) -> None:
    leaves = found.leaves
    grid = Grid((1,), (0,))
    entries = {
        name: TensorEntry(name_of(leaf.dtype, name), leaf.shape, grid, None, 0)
        for name, leaf in leaves.items()
    }
    values: dict[str, Any] = {"ties": found.ties}
    values["states"] = {name: encode(one, name) for name, one in found.states.items()}
    if found.left_out:
        values["left_out"] = found.left_out
    if found.groups is not None:
        single = {
            name: {key: encode(one, f"{key!r} of {name}") for key, one in kept.items()}
            for name, kept in found.single.items()
        }
        values["optimizer"] = {
            "state": single,
            "param_groups": encode(found.groups, "param_groups"),
        }
    encode(found.extra, "extra")
    make_folder(unfinished)
    name = "rank-00000.safetensors"
    written = {name: leaf for name, leaf in leaves.items() if leaf.nbytes}
    kinds = {name: (leaf.dtype, leaf.shape) for name, leaf in written.items()}
    with DataWriter(unfinished / name, kinds) as file:
        for own, leaf in written.items():
            data = flat_bytes(leaf.read())
            for start in range(0, data.nbytes, CHUNK_NBYTES):
                chunk = data[start : start + CHUNK_NBYTES]
                file.put(own, start, chunk)
                more(chunk.nbytes)
        nbytes, digest = file.finish()
    manifest = Manifest(
        step=found.step,
        time=time.time(),
        versions={"fullshard": __version__, "torch": torch.__version__},
        contents=[Contents(entries, values)],
        files=[FileInfo(name, 0, nbytes, digest, 0)],
        extra=found.extra,
    )
    manifest.check()
    seal(unfinished, manifest.to_json())


def _write_dcp(found: FullCheckpoint, unfinished: Path, more: Callable[[int], None]) -> None:
    import torch.distributed.checkpoint as dcp

    with _state_of(found, unfinished.parent, more) as state, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it is meant to be
        dcp.save(state, checkpoint_id=unfinished, no_dist=True)


def _write_file(found: FullCheckpoint, unfinished: Path, more: Callable[[int], None]) -> None:
    with _state_of(found, unfinished.parent, more) as state, unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _state_of(
    found: FullCheckpoint, folder: Path, more: Callable[[int], None]
) -> Iterator[dict[str, Any]]:
    """Give the dictionary that PyTorch saves; its tensors are in a temporary file in ``folder``."""
    with tempfile.TemporaryFile(dir=folder) as file:
        sizes = [round_up(leaf.nbytes, 64) for leaf in found.leaves.values()]
        file.truncate(sum(sizes) + 1)
        if sys.platform == "linux":
            # Allocate the space now: on a full disk, a write to the mapped file kills the process.
            os.posix_fallocate(file.fileno(), 0, sum(sizes) + 1)
        memory = memoryview(mmap.mmap(file.fileno(), 0))
        end = 0

        def kept(leaf: Leaf) -> Tensor:
            nonlocal end
            tensor = leaf.read()
            start, end = end, end + round_up(leaf.nbytes, 64)
            more(tensor.nbytes)
            if not tensor.numel():
                return tensor
            own = torch.frombuffer(memory[start : start + tensor.nbytes], dtype=tensor.dtype)
            return own.view(tensor.shape).copy_(tensor)

        model: dict[str, Any] = {name: kept(leaf) for name, leaf in found.model.items()}
        model |= {name: model[first] for name, first in found.ties.items()} | found.states
        state: dict[str, Any] = {"model": model, "step": found.step}
        if found.groups is not None:
            kept_state = {name: {**single} for name, single in found.single.items()}
            for full, leaf in found.optimizer.items():
                name, _, key = full.rpartition("/")
                kept_state.setdefault(name, {})[key] = kept(leaf)
            state["optim"] = {"state": kept_state, "param_groups": found.groups}
        state[EXTRA] = json.dumps(encode(found.extra, "extra"), allow_nan=False)
        yield state


_WRITERS = {"fullshard": _write_ours, "dcp": _write_dcp, "torch": _write_file}
