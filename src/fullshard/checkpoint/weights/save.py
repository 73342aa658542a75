"""Export weights: Hugging Face's names, which rank has which part, files."""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fullshard.checkpoint.format import (
    AnyPlace,
    Manifest,
    NewFile,
    ObjectUrl,
    Place,
    datafile,
    flush_folder,
    make_folder,
    new_file,
    place_of,
    unfinished_at,
    write_flushed,
)
from fullshard.checkpoint.saving import (
    Collected,
    await_save,
    digests_of,
    merged,
    refuse_apart,
    shared,
    shared_digests,
)
from fullshard.checkpoint.weights.names import (
    INDEX,
    SINGLE,
    Stored,
    check_merged,
    is_real,
    own_class,
    plain_names,
    pretrained,
    stored_tensors,
)
from fullshard.comm.blocking import all_to_all_bytes
from fullshard.comm.consensus import Consensus
from fullshard.errors import CheckpointError, ConfigError, UnsupportedError
from fullshard.layout.region import Region
from fullshard.progress import Operation
from fullshard.tensors.transfer import ALIGN, Part, pack, parts_of, places, unpack


def described(
    consensus: Consensus, model: nn.Module, options: object
) -> tuple[Collected, Manifest]:
    """Collect this rank's tensors of ``model``, and agree once on the manifest of all ranks.

    Args:
        consensus: of all ranks.
        model: sharded or not.
        options: in JSON's types; equal on all ranks.

    Raises:
        ConfigError: ranks differ in ``options``.
        UnsupportedError: the model has extra state, which goes nowhere.
    """
    found = Collected(consensus.rank, consensus.world)

    def collect() -> list[object]:
        found.add_model(model)
        states = {name: state for name, state in found.values["states"].items() if state}
        if states:
            raise UnsupportedError(
                f"extra state of modules, {', '.join([*states][:8])}, has no place among weights; "
                "save() keeps it"
            )
        return [shared(consensus, found), options]

    def describe(said: list[list[object]]) -> str:
        if any(one[1] != said[0][1] for one in said):
            raise ConfigError("ranks differ in their options: give all the same")
        return merged(consensus, [str(key) for key, _ in said]).to_json().decode()

    return found, Manifest.from_json(consensus.agree(collect, describe).encode())


class Planned(NamedTuple):
    """A tensor as others know it, and the dtype in which they get it."""

    stored: Stored
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.stored.region.numel * self.dtype.itemsize


def planned_tensors(
    model: nn.Module, manifest: Manifest, dtype: torch.dtype | None
) -> list[Planned]:
    """Return all tensors; those of floating point in ``dtype`` unless it is None.

    Raises:
        ConfigError: files cannot hold ``dtype``, or it is not of floating point.
        UnsupportedError: adapters are not merged.
    """
    check_merged(model)
    if dtype is not None and not (is_real(dtype) and datafile.is_known(dtype)):
        raise ConfigError(
            f"dtype={dtype}: expected a floating-point dtype of at least 16 bits that safetensors "
            "files can hold"
        )
    entries = {n.removeprefix("model/"): manifest.entry(n) for n in manifest.names()}
    inner = pretrained(model)
    ignored = getattr(inner, "_keys_to_ignore_on_save", None) or ()  # such as computed positions
    used = plain_names(model, entries, in_use=True)
    used = {name: plain for name, plain in used.items() if plain not in ignored}
    shapes = {name: entry.shape for name, entry in entries.items() if name in used}
    found = []
    for stored in stored_tensors(model, shapes):
        own = datafile.dtype_of(entries[stored.source].dtype)
        found.append(Planned(stored, dtype if dtype is not None and is_real(own) else own))
    return found


def grouped(
    tensors: Sequence[Planned], nbytes: int, size: Callable[[Planned], int]
) -> list[list[Planned]]:
    """Divide tensors, in their order, into groups of at most ``nbytes``, or of one tensor."""
    found: list[list[Planned]] = []
    room = 0
    for one in tensors:
        if not found or size(one) > room:
            found.append([])
            room = nbytes
        found[-1].append(one)
        room -= size(one)
    return found


class FilePiece(NamedTuple):
    """Elements ``start`` to ``stop`` of a tensor; ``file`` is the number of where it goes."""

    file: int
    planned: Planned
    start: int
    stop: int

    @property
    def source(self) -> str:
        """Name of the model's tensor in a manifest."""
        return f"model/{self.planned.stored.source}"

    @property
    def region(self) -> Region:
        """Its elements of the model's tensor."""
        return self.planned.stored.region.part(self.start, self.stop)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return (self.stop - self.start) * self.planned.dtype.itemsize


def parts_by_rank(manifest: Manifest, batch: Sequence[FilePiece]) -> list[list[Part[str]]]:
    """Return for each rank the parts that it has of the pieces in ``batch``, by their numbers."""
    found: list[list[Part[str]]] = [[] for _ in manifest.files]
    for at, piece in enumerate(batch):
        for one in manifest.parts(piece.source, piece.region):
            found[one.file.rank] += parts_of(piece.source, one.region, at, piece.region)
    return found


def size_of(parts: Sequence[Part[str]], batch: Sequence[FilePiece]) -> int:
    """Return the size of the message with these parts of ``batch``, in bytes."""
    return places(part.numel * batch[part.block].planned.dtype.itemsize for part in parts)[-1]


def put_parts(
    parts: Sequence[Part[str]],
    batch: Sequence[FilePiece],
    tensors: Mapping[str, Tensor],
    message: Tensor,
) -> None:
    """Put parts that this rank has into a message, in the dtypes in which they are wanted.

    Args:
        parts: of this rank.
        batch: the pieces that they are parts of.
        tensors: the local tensors of this rank, by the names of a manifest.
        message: flat bytes on any device.
    """
    flats = {name: tensors[name].detach().reshape(-1) for name in {part.local for part in parts}}
    pack(
        [part.of_local(flats[part.local]) for part in parts],
        message,
        (batch[part.block].planned.dtype for part in parts),
    )


log = logging.getLogger(__name__)

_BUFFER_NBYTES = 32 << 20  # what a rank sends and receives at once, about
_SMALLEST_FILE_NBYTES = 64 << 20


def save_weights(
    model: nn.Module,
    folder: AnyPlace,
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
        folder: does not exist; it appears when everything is on the disk. Or a URL of an object
            store where nothing is; the index of several files is written last.
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
    folder = place_of(folder)
    consensus = Consensus(f"save weights to {folder}", "save", "weights")
    found, manifest = described(consensus, model, [str(dtype), max_file_nbytes])
    plans: list[_Plan] = []

    def plan() -> str:
        if max_file_nbytes < 1:
            raise ConfigError(f"max_file_nbytes={max_file_nbytes}: expected a positive number")
        if isinstance(folder, ObjectUrl):
            folder.check()
        plans.append(_Plan(model, manifest, dtype, max_file_nbytes))
        return shared_digests(consensus, digests_of(found.replicas))

    def begin(keys: list[str]) -> str:
        refuse_apart(consensus, keys)
        if isinstance(folder, ObjectUrl):
            if folder.below():
                raise ConfigError("there are objects at this URL; weights need a new one")
            return str(folder)
        if folder.exists():
            raise ConfigError("there is something at this path; weights need a new one")
        unfinished = unfinished_at(folder)
        make_folder(unfinished)
        return str(unfinished)

    unfinished = place_of(consensus.agree(plan, begin))

    def write() -> None:
        with closing(_Writer(plans[0], found.parts, consensus, unfinished)) as writer:
            writer.write()

    def finish(_: list[None]) -> None:
        if isinstance(unfinished, ObjectUrl):
            with tempfile.TemporaryDirectory() as small:
                _write_configuration(model, Path(small), plans[0])
                for one in sorted(Path(small).iterdir()):
                    (unfinished / one.name).write(one.read_bytes())
            plans[0].write_index(unfinished)
            return
        assert isinstance(folder, Path)
        plans[0].write_index(unfinished)
        _write_configuration(model, unfinished, plans[0])
        for one in unfinished.glob("*.json"):
            with one.open("rb") as file:
                os.fsync(file.fileno())
        flush_folder(unfinished)
        unfinished.rename(folder)
        flush_folder(folder.parent)

    def undo() -> None:
        if isinstance(unfinished, ObjectUrl):
            with suppress(CheckpointError):
                for name in unfinished.below():  # there was nothing before
                    (unfinished / name).remove()
        else:
            shutil.rmtree(unfinished, ignore_errors=True)

    consensus.agree(write, finish, undo=undo)


class _Plan:
    """Which tensors are in which files; the same on all ranks.

    Attributes:
        files: the tensors of each file, in the order in which they are written.
        names: of the files.
        work: the progress of all ranks.
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
        self.work = Operation("saving weights", sum(one.nbytes for one in self.tensors))
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
        sizes = (
            ((number, one), one.nbytes, one.dtype.itemsize)
            for number, file in enumerate(self.files)
            for one in (file if number % world == rank else ())
        )
        for batch in datafile.batches(sizes, nbytes):
            yield [
                FilePiece(number, one, start // one.dtype.itemsize, stop // one.dtype.itemsize)
                for (number, one), start, stop in batch
            ]

    def write_index(self, folder: Place) -> None:
        """Write which tensor is in which file, if there are several."""
        if len(self.files) > 1:
            pairs = zip(self.names, self.files, strict=True)
            where = {one.stored.name: name for name, file in pairs for one in file}
            size = sum(one.nbytes for one in self.tensors)
            index = {"metadata": {"total_size": size}, "weight_map": where}
            text = json.dumps(index, indent=2, sort_keys=True)
            data = f"{text}\n".encode()
            if isinstance(folder, ObjectUrl):
                (folder / INDEX).write(data)
            else:
                write_flushed(folder / INDEX, data)


class _Writer:
    """Writes this rank's files, and gives other ranks what theirs need."""

    def __init__(
        self, plan: _Plan, parts: Mapping[str, Tensor], consensus: Consensus, folder: Place
    ) -> None:
        self._plan = plan
        self._parts = parts
        self._rank, self._world = consensus.rank, consensus.world
        self._folder = folder
        self._file: NewFile | None = None
        self._file_number = -1
        self._buffers: dict[str, Tensor] = {}

    def write(self) -> None:
        """Take part in all rounds; a collective."""
        nbytes = _BUFFER_NBYTES // 2 // min(self._world, len(self._plan.files))
        rounds = [list(self._plan.rounds(rank, nbytes)) for rank in range(self._world)]
        failure: Exception | None = None
        for number in range(max(map(len, rounds))):
            batches = [own[number] if number < len(own) else [] for own in rounds]
            parts = [parts_by_rank(self._plan.manifest, batch) for batch in batches]
            given = self._exchange(batches, parts, failure)
            if given is None:
                break
            try:
                self._write(batches[self._rank], parts[self._rank], given)
                self._plan.work.add(sum(piece.nbytes for batch in batches for piece in batch))
            except Exception as error:
                failure = error  # the next round says so
        try:
            self.close()
            self._write_empty_files()
        except Exception as error:
            failure = failure or error
        if failure is not None:
            raise failure

    def _exchange(
        self,
        batches: Sequence[Sequence[FilePiece]],
        parts: Sequence[Sequence[Sequence[Part[str]]]],
        failure: Exception | None,
    ) -> list[Tensor] | None:
        """Send each rank what its batch needs of this one; return what all sent to this rank.

        Args:
            batches: by the rank that writes.
            parts: by the rank that writes, and the rank that sends.
            failure: why this rank cannot go on; if it is None, raised afterwards.

        Returns:
            None on all ranks if one cannot go on.
        """
        own = [of_writer[self._rank] for of_writer in parts]
        # A message begins with the sign that its rank could fill it.
        lengths = [ALIGN + size_of(*one) for one in zip(own, batches, strict=True)]
        sizes = [ALIGN + size_of(one, batches[self._rank]) for one in parts[self._rank]]
        sent = self._buffer("sent", sum(lengths))
        given = sent if self._world == 1 else self._buffer("given", sum(sizes))
        messages = sent.split(lengths)
        for message in messages:
            message[0] = 0
        try:
            if failure is None:
                for one, batch, message in zip(own, batches, messages, strict=True):
                    put_parts(one, batch, self._parts, message[ALIGN:])
                for message in messages:
                    message[0] = 1
        finally:
            found = all_to_all_bytes(sent, lengths, given, sizes)
        return found if all(one[0] for one in found) else None

    def _buffer(self, name: str, nbytes: int) -> Tensor:
        """Return flat bytes, in memory of all rounds: the allocator would keep some of each."""
        if name not in self._buffers or self._buffers[name].nbytes < nbytes:
            self._buffers.pop(name, None)
            self._buffers[name] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return self._buffers[name][:nbytes]

    def _write(
        self,
        batch: Sequence[FilePiece],
        parts: Sequence[Sequence[Part[str]]],
        given: Sequence[Tensor],
    ) -> None:
        """Put the parts of each piece together and write it."""
        *starts, nbytes = places(piece.nbytes for piece in batch)
        memory = self._buffer("pieces", nbytes)
        pieces = [
            memory[start : start + piece.nbytes].view(piece.planned.dtype)
            for start, piece in zip(starts, batch, strict=True)
        ]
        for own, data in zip(parts, given, strict=True):
            unpack(data[ALIGN:], [part.of_block(pieces[part.block]) for part in own])
        for piece, values in zip(batch, pieces, strict=True):
            self._open(piece.file)
            assert self._file is not None
            self._file.write(datafile.memory_of(datafile.bytes_of(values)))

    def _open(self, number: int) -> None:
        """Begin file ``number``, unless it is open."""
        if number != self._file_number:
            self.close()
            self._file_number = number
            tensors = [(p.stored.name, p.dtype, p.stored.shape) for p in self._plan.files[number]]
            header = datafile.header_of(tensors, {"format": "pt"})
            nbytes = len(header) + sum(one.nbytes for one in self._plan.files[number])
            self._file = new_file(self._folder / self._plan.names[number], nbytes, header)

    def close(self) -> None:
        """Close the open file, if there is one; an object that is not complete is given up."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _write_empty_files(self) -> None:
        """Write this rank's files that have no elements at all."""
        for number, file in enumerate(self._plan.files):
            empty = not any(one.stored.region.numel for one in file)
            if empty and number % self._world == self._rank:
                self._open(number)
                self.close()


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
