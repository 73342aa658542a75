"""Weights on their way to others: under which names they go, which rank has what, messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fullshard.checkpoint import datafile
from fullshard.checkpoint.adapted import check_merged, plain_names
from fullshard.checkpoint.collecting import Collected
from fullshard.checkpoint.manifest import FileInfo, Manifest
from fullshard.checkpoint.saving import merged, shared
from fullshard.checkpoint.stored import Stored, stored_tensors
from fullshard.comm.council import Council
from fullshard.errors import ConfigError, UnsupportedError
from fullshard.layout.region import Overlap, Region

ALIGN = 16


def described(council: Council, found: Collected, model: nn.Module, options: object) -> Manifest:
    """Return what all ranks have of ``model``; one decision of ``council``.

    Args:
        council: of all ranks.
        found: empty; gets what this rank has.
        model: sharded or not.
        options: in JSON's types; equal on all ranks.

    Raises:
        ConfigError: ranks differ in ``options``.
        UnsupportedError: the model has extra state, which goes nowhere.
    """

    def collect() -> list[object]:
        found.add_model(model)
        states = {name: state for name, state in found.values["states"].items() if state}
        if states:
            raise UnsupportedError(
                f"extra state of modules, {', '.join([*states][:8])}, has no place among weights; "
                "save() keeps it"
            )
        return [shared(council, found), options]

    def describe(said: list[list[object]]) -> str:
        if any(one[1] != said[0][1] for one in said):
            raise ConfigError("ranks differ in their options: give all the same")
        contents, numbers = merged(council, [str(key) for key, _ in said])
        files = [FileInfo(f"rank-{rank}", rank, 0, "", one) for rank, one in enumerate(numbers)]
        manifest = Manifest(0, 0.0, {}, contents, files, None)
        manifest.check()
        return manifest.to_json().decode()

    return Manifest.from_json(council.agree(collect, describe).encode())


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
    if dtype is not None and not (dtype.is_floating_point and datafile.is_known(dtype)):
        raise ConfigError(f"dtype={dtype}: expected one of floating point that files can hold")
    entries = {n.removeprefix("model/"): manifest.entry(n) for n in manifest.names()}
    used = plain_names(model, entries, in_use=True)
    shapes = {name: entry.shape for name, entry in entries.items() if name in used}
    found = []
    for stored in stored_tensors(model, shapes):
        own = datafile.dtype_of(entries[stored.source].dtype)
        cast = dtype is not None and own.is_floating_point
        found.append(Planned(stored, dtype if cast and dtype is not None else own))
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


class Share(NamedTuple):
    """The part of a piece that one rank has.

    Attributes:
        at: number of the piece in its batch.
        piece: the piece.
        overlaps: what the piece and the rank's part have in common.
        nbytes: the size of that.
    """

    at: int
    piece: FilePiece
    overlaps: list[Overlap]
    nbytes: int


def shares_of(manifest: Manifest, batch: Sequence[FilePiece]) -> list[list[Share]]:
    """Return for each rank the parts that it has of the pieces in ``batch``."""
    found: list[list[Share]] = [[] for _ in manifest.files]
    for at, piece in enumerate(batch):
        for part in manifest.parts(piece.source, piece.region):
            overlaps = list(piece.region.overlaps(part.region))
            nbytes = sum(one.numel for one in overlaps) * piece.planned.dtype.itemsize
            if nbytes:
                found[part.file.rank].append(Share(at, piece, overlaps, nbytes))
    return found


def size_of(shares: Sequence[Share]) -> int:
    """Return the size of a message with these parts, in bytes."""
    return sum(aligned(share.nbytes) for share in shares)


def aligned(nbytes: int) -> int:
    """Return the next multiple of ``ALIGN``."""
    return -(-nbytes // ALIGN) * ALIGN


def pack(shares: Sequence[Share], parts: Mapping[str, Tensor], message: Tensor) -> None:
    """Put parts that this rank has into a message, in the dtypes in which they are wanted.

    Args:
        shares: of this rank.
        parts: the local tensors of this rank, by the names of a manifest.
        message: flat bytes on any device.
    """
    offset = 0
    for share in shares:
        local = parts[share.piece.source].detach().reshape(-1)
        first, start = local.storage_offset(), offset
        for one in share.overlaps:
            box = local.as_strided(one.sizes, one.other_strides, first + one.other_offset)
            nbytes = one.numel * share.piece.planned.dtype.itemsize
            place = message[start : start + nbytes].view(share.piece.planned.dtype)
            place.view(one.sizes).copy_(box)
            start += nbytes
        offset += aligned(share.nbytes)


def unpack(shares: Sequence[Share], message: Tensor, pieces: Sequence[Tensor]) -> None:
    """Put a message's parts into the pieces of the batch, flat tensors."""
    offset = 0
    for share in shares:
        values = message[offset : offset + share.nbytes].view(share.piece.planned.dtype)
        counts = [one.numel for one in share.overlaps]
        piece = pieces[share.at]
        first = piece.storage_offset()
        for one, source in zip(share.overlaps, values.split(counts), strict=True):
            target = piece.as_strided(one.sizes, one.strides, first + one.offset)
            target.copy_(source.view(one.sizes))
        offset += aligned(share.nbytes)
