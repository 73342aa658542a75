"""Compare two checkpoints, however their tensors are cut."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fullshard.checkpoint.format import (
    AnyPlace,
    Manifest,
    Place,
    bytes_of,
    dtype_of,
    in_folder,
    place_of,
    read_manifest,
)
from fullshard.checkpoint.loading import Reader, WantedPart
from fullshard.layout.region import full_region
from fullshard.progress import Operation


def differences(path: AnyPlace, other: AnyPlace) -> Iterator[tuple[str, str]]:
    """Yield the names of tensors that differ between two checkpoints, and how.

    Two full tensors are in memory at a time.

    Raises:
        CheckpointError: one of the checkpoints is damaged.
    """
    paths = (place_of(path), place_of(other))
    one, two = map(read_manifest, paths)
    nbytes = sum(file.nbytes for own in (one, two) for file in own.files)
    work = Operation(f"comparing {paths[0].name} and {paths[1].name}", nbytes)
    for name in dict.fromkeys((*one.names(), *two.names())):
        if name not in one or name not in two:
            yield name, f"only in {paths[0] if name in one else paths[1]}"
            continue
        kinds = [f"{entry.dtype} {entry.shape}" for entry in (one.entry(name), two.entry(name))]
        if kinds[0] != kinds[1]:
            yield name, " and ".join(kinds)
            continue
        a, b = (full_tensor_in(at, its, name) for at, its in zip(paths, (one, two), strict=True))
        work.add(a.nbytes + b.nbytes)
        if not torch.equal(bytes_of(a), bytes_of(b)):
            differ = (bytes_of(a).view(-1, a.itemsize) != bytes_of(b).view(-1, a.itemsize)).any(1)
            wide = torch.complex128 if a.is_complex() else torch.float64
            apart = (a[differ].to(wide) - b[differ].to(wide)).abs().max()
            yield name, f"{int(differ.sum())} elements differ, by {apart:.3g} at most"


def full_tensor_in(path: Place, manifest: Manifest, name: str) -> Tensor:
    """Return all of a tensor, flat."""
    entry = manifest.entry(name)
    region = full_region(entry.shape)
    memory = torch.empty(region.numel, dtype=dtype_of(entry.dtype), device="cpu")
    with Reader(in_folder(path), manifest, {name: WantedPart(region, memory)}) as reader:
        reader.read([])
    return memory
