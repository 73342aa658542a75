"""Write weights for others to read: safetensors files as ``transformers`` names and reads them."""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.checkpoint import datafile
from fullshard.checkpoint.collecting import Collected
from fullshard.checkpoint.committing import flush_folder, make_folder, write_flushed
from fullshard.checkpoint.folders import UNFINISHED
from fullshard.checkpoint.manifest import Manifest
from fullshard.checkpoint.outgoing import (
    ALIGN,
    FilePiece,
    Share,
    aligned,
    described,
    grouped,
    pack,
    planned_tensors,
    shares_of,
    size_of,
    unpack,
)
from fullshard.checkpoint.pending import await_save
from fullshard.checkpoint.replicas import digests_of, refuse_apart, shared_digests
from fullshard.checkpoint.stored import INDEX, SINGLE, own_class, pretrained
from fullshard.comm.blocking import all_to_all_bytes
from fullshard.comm.council import Council
from fullshard.errors import ConfigError, UnsupportedError

log = logging.getLogger(__name__)

_BUFFER_NBYTES = 32 << 20  # what a rank sends and receives at once, about
_SMALLEST_FILE_NBYTES = 64 << 20


def save_weights(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_nbytes: int = 5_000_000_000,
) -> None:
    """Write a model's weights to the new folder ``folder``; all ranks must call this.

    ``transformers`` and ``load_weights`` read them. Ranks write different files at the same time,
    and hand each other what these need, a piece at a time; no rank ever has a whole model. For a
    model of ``transformers``, its configuration is written as well.

    Args:
        model: a model, sharded or not.
        folder: does not exist; it appears when everything is on the disk.
        dtype: cast weights and buffers of floating point to this; None: as they are.
        max_file_nbytes: the size of files, unless one tensor is larger.

    Raises:
        ConfigError: there is something at ``folder``, or ranks hold plain parameters of one name
            with different values.
        UnsupportedError: such files cannot hold something of this model.
        CheckpointError: a rank could not write; nothing is left behind.
        LostRankError: a rank ended or hangs.
        ProtocolError: during a forward, a backward or ``unshard_params``.

    All ranks raise the same.
    """
    await_save()
    folder = Path(folder)
    council = Council(f"save weights to {folder}", "save", "weights")
    found = Collected(council.rank, council.world)
    manifest = described(council, found, model, [str(dtype), max_file_nbytes])
    plans: list[_Plan] = []

    def plan() -> str:
        if max_file_nbytes < 1:
            raise ConfigError(f"max_file_nbytes={max_file_nbytes}: expected a positive number")
        plans.append(_Plan(model, manifest, dtype, max_file_nbytes))
        return shared_digests(council, digests_of(found.replicas))

    def begin(keys: list[str]) -> str:
        refuse_apart(council, keys)
        if folder.exists():
            raise ConfigError("there is something at this path; weights need a new one")
        unfinished = folder.with_name(f"{UNFINISHED}{folder.name}-{uuid.uuid4().hex[:8]}")
        make_folder(unfinished)
        return str(unfinished)

    unfinished = Path(council.agree(plan, begin))

    def write() -> None:
        _Writer(plans[0], found.parts, council, unfinished).write()

    def finish(_: list[None]) -> None:
        plans[0].write_index(unfinished)
        _write_configuration(model, unfinished, plans[0])
        flush_folder(unfinished)
        unfinished.rename(folder)
        flush_folder(folder.parent)

    council.agree(write, finish, undo=lambda: shutil.rmtree(unfinished, ignore_errors=True))


class _Plan:
    """Which tensors are in which files; the same on all ranks.

    Attributes:
        files: the tensors of each file, in the order in which they are written.
        names: of the files.
    """

    def __init__(
        self,
        model: nn.Module,
        manifest: Manifest,
        dtype: torch.dtype | None,
        max_file_nbytes: int,
    ) -> None:
        self.manifest = manifest
        world = len(manifest.files)
        self.tensors = planned_tensors(model, manifest, dtype)
        for one in self.tensors:
            if one.dtype == torch.complex128:
                raise UnsupportedError(
                    f"{one.stored.name} is of {one.dtype}; such files cannot hold it"
                )
        share = sum(one.nbytes for one in self.tensors) // world
        limit = min(max_file_nbytes, max(share + 1, _SMALLEST_FILE_NBYTES))
        groups = grouped(self.tensors, limit, lambda one: one.nbytes) or [[]]
        # Large elements first, so that every tensor is aligned to its elements.
        self.files = [sorted(group, key=lambda one: -one.dtype.itemsize) for group in groups]
        count = len(groups)
        self.names = [f"model-{at + 1:05d}-of-{count:05d}.safetensors" for at in range(count)]
        if count == 1:
            self.names = [SINGLE]

    def rounds(self, rank: int, nbytes: int) -> Iterator[list[FilePiece]]:
        """Yield what ``rank`` writes, so many bytes at a time."""
        world = len(self.manifest.files)
        batch: list[FilePiece] = []
        room = nbytes
        for number, file in enumerate(self.files):
            for one in file if number % world == rank else ():
                start = 0
                while start < one.stored.region.numel:
                    count = max(room // one.dtype.itemsize, 1)
                    stop = min(start + count, one.stored.region.numel)
                    batch.append(FilePiece(number, one, start, stop))
                    room -= batch[-1].nbytes
                    start = stop
                    if room <= 0:
                        yield batch
                        batch, room = [], nbytes
        if batch:
            yield batch

    def write_index(self, folder: Path) -> None:
        """Write which tensor is in which file, if there are several."""
        if len(self.files) > 1:
            pairs = zip(self.names, self.files, strict=True)
            where = {one.stored.name: name for name, file in pairs for one in file}
            size = sum(one.nbytes for one in self.tensors)
            index = {"metadata": {"total_size": size}, "weight_map": where}
            text = json.dumps(index, indent=2, sort_keys=True)
            write_flushed(folder / INDEX, f"{text}\n".encode())


class _Writer:
    """Writes this rank's files, and gives other ranks what theirs need."""

    def __init__(
        self, plan: _Plan, parts: Mapping[str, Tensor], council: Council, folder: Path
    ) -> None:
        self._plan = plan
        self._parts = parts
        self._rank, self._world = council.rank, council.world
        self._folder = folder
        self._file: Any = None
        self._file_number = -1
        self._buffers: dict[str, Tensor] = {}

    def write(self) -> None:
        """Take part in all rounds; a collective."""
        nbytes = _BUFFER_NBYTES // 2 // min(self._world, len(self._plan.files))
        rounds = [list(self._plan.rounds(rank, nbytes)) for rank in range(self._world)]
        failure: Exception | None = None
        for number in range(max(map(len, rounds))):
            batches = [own[number] if number < len(own) else [] for own in rounds]
            shares = [shares_of(self._plan.manifest, batch) for batch in batches]
            given = self._exchange(shares, failure)
            if given is None:
                break
            try:
                self._write(batches[self._rank], shares[self._rank], given)
            except Exception as error:
                failure = error  # the next round says so
        try:
            self._close()
            self._write_empty_files()
        except Exception as error:
            failure = failure or error
        if failure is not None:
            raise failure

    def _exchange(
        self, shares: Sequence[Sequence[Sequence[Share]]], failure: Exception | None
    ) -> list[Tensor] | None:
        """Send each rank what its batch needs of this one; return what all sent to this rank.

        Args:
            shares: by the rank that writes, and the rank that sends.
            failure: why this rank cannot go on; if it is None, raised afterwards.

        Returns:
            None on all ranks if one cannot go on.
        """
        own = [of_writer[self._rank] for of_writer in shares]
        lengths = [_nbytes(one) for one in own]
        sizes = [_nbytes(one) for one in shares[self._rank]]
        sent = self._buffer("sent", sum(lengths))
        given = sent if self._world == 1 else self._buffer("given", sum(sizes))
        messages = sent.split(lengths)
        for message in messages:
            message[0] = 0
        try:
            if failure is None:
                for one, message in zip(own, messages, strict=True):
                    pack(one, self._parts, message[ALIGN:])
                for message in messages:
                    message[0] = 1
        finally:
            found = all_to_all_bytes(sent, lengths, given, sizes)
        return found if all(one[0] for one in found) else None

    def _buffer(self, name: str, nbytes: int) -> Tensor:
        """Return flat bytes, in memory of all rounds: the allocator would keep some of each."""
        if name not in self._buffers or self._buffers[name].nbytes < nbytes:
            self._buffers.pop(name, None)
            self._buffers[name] = torch.empty(nbytes, dtype=torch.uint8)
        return self._buffers[name][:nbytes]

    def _write(
        self,
        batch: Sequence[FilePiece],
        shares: Sequence[Sequence[Share]],
        given: Sequence[Tensor],
    ) -> None:
        """Put the parts of each piece together and write it."""
        sizes = [aligned(piece.nbytes) for piece in batch]
        places = self._buffer("pieces", sum(sizes)).split(sizes)
        pieces = [
            place[: piece.nbytes].view(piece.planned.dtype)
            for place, piece in zip(places, batch, strict=True)
        ]
        for own, data in zip(shares, given, strict=True):
            unpack(own, data[ALIGN:], pieces)
        for piece, values in zip(batch, pieces, strict=True):
            self._open(piece.file)
            data = datafile.array_of(datafile.bytes_of(values))
            datafile.write_all(self._file, memoryview(data))

    def _open(self, number: int) -> None:
        """Begin file ``number``, unless it is open."""
        if number != self._file_number:
            self._close()
            self._file_number = number
            self._file = (self._folder / self._plan.names[number]).open("xb", buffering=0)
            tensors = [(p.stored.name, p.dtype, p.stored.shape) for p in self._plan.files[number]]
            header = datafile.header_of(tensors, {"format": "pt"})
            datafile.write_all(self._file, memoryview(header))

    def _close(self) -> None:
        if self._file is not None:
            with self._file:
                os.fsync(self._file.fileno())
            self._file = None

    def _write_empty_files(self) -> None:
        """Write this rank's files that have no elements at all."""
        for number, file in enumerate(self._plan.files):
            empty = not any(one.stored.region.numel for one in file)
            if empty and number % self._world == self._rank:
                self._open(number)
                self._close()


def _write_configuration(model: nn.Module, folder: Path, plan: _Plan) -> None:
    """Write ``config.json`` and its like, if the model is of ``transformers``."""
    inner = pretrained(model)
    if inner is None or not hasattr(inner.config, "save_pretrained"):
        return
    config = copy.deepcopy(inner.config)
    config.architectures = [own_class(inner).__name__]
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # what is written is not quantised
    dtypes = [one.dtype for one in plan.tensors if one.dtype.is_floating_point]
    if dtypes:
        config.dtype = max(set(dtypes), key=dtypes.count)
    config.save_pretrained(folder)
    if getattr(inner, "generation_config", None) is not None and inner.can_generate():
        try:
            inner.generation_config.save_pretrained(folder)
        except ValueError as error:  # it may be inconsistent; weights are worth more
            log.warning("%s has no generation_config.json: %s", folder, error)


def _nbytes(shares: Sequence[Share]) -> int:
    """Return the size of the message with these parts, behind the sign that a rank could."""
    return ALIGN + size_of(shares)
