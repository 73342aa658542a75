"""Find out which tensors are parts of one flat buffer, and thus neighbors in memory.

Users hold the tensors of a bucket as separate tensors, each with a separate storage object. Code
that treats them as one tensor, such as an optimizer, asks this module. A flat buffer is announced
when it is made. As long as the buffer exists, the address of a part finds the buffer.

    flat     | w w w w w w | . . | b b b |         parts (0, 6) and (8, 3); neighbors
    part     |      0      |     |   1   |         are parts with consecutive numbers
"""

from __future__ import annotations

import weakref
from bisect import bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fullshard._torch import memory as _memory


@dataclass(frozen=True, slots=True, eq=False)
class FlatPart:
    """The position of a tensor in a flat buffer.

    Attributes:
        flat: the 1-D buffer. Between neighbors there is only padding, which belongs to no part.
        number: index of the part among the parts that are not empty, in the order of memory.
        start: index in ``flat`` of the first element.
        stop: one past the last element.
    """

    flat: Tensor
    number: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Flat:
    tensor: weakref.ref[Tensor]
    parts: dict[int, tuple[int, int]]  # start -> (number, length)


class _Flats(NamedTuple):
    """The flat buffers of one device."""

    by_address: dict[int, _Flat]  # of the first byte
    addresses: list[int]  # sorted


_flats: dict[torch.device, _Flats] = {}


def announce_flat(flat: Tensor, parts: Iterable[tuple[int, int]]) -> None:
    """Announce that tensors in the memory of ``flat`` are parts, for ``flat_part_of`` to find.

    Args:
        flat: the 1-D buffer, which is never resized; it is not kept alive.
        parts: first element and number of elements of each part; empty parts are ignored.
    """
    if not flat.numel():
        return
    filled = sorted((start, length) for start, length in parts if length)
    numbered = {start: (number, length) for number, (start, length) in enumerate(filled)}
    if flat.is_meta:  # without addresses; a part knows where it is (``_memory.own_part``)
        _memory.announce_on_meta(flat, numbered)
        return
    device, address = flat.device, flat.data_ptr()
    flats = _flats.setdefault(device, _Flats({}, []))
    if address not in flats.by_address:
        insort(flats.addresses, address)
    reference = weakref.ref(flat, lambda _: _forget(flats, address, reference))
    flats.by_address[address] = _Flat(reference, numbered)


def flat_part_of(tensor: Tensor) -> FlatPart | None:
    """Return the part that the contiguous ``tensor`` covers completely; None if there is none."""
    if tensor.is_meta:
        return _part_on_meta(tensor)
    flats = _flats.get(tensor.device)
    address = tensor.data_ptr()
    at = bisect_right(flats.addresses, address) if flats is not None else 0
    if flats is None or not at or not tensor.is_contiguous():
        return None
    first = flats.addresses[at - 1]
    known = flats.by_address[first]
    flat = known.tensor()
    start = (address - first) // tensor.itemsize
    number, length = known.parts.get(start, (0, 0))
    if flat is None or flat.dtype != tensor.dtype or length == 0 or length != tensor.numel():
        return None
    return FlatPart(flat, number, start, start + length)


def _part_on_meta(tensor: Tensor) -> FlatPart | None:
    flat, start, (number, length) = _memory.part_on_meta(tensor)
    if flat is None or flat.dtype != tensor.dtype or length == 0 or length != tensor.numel():
        return None
    return FlatPart(flat, number, start, start + length)


def _forget(flats: _Flats, address: int, reference: weakref.ref[Tensor]) -> None:
    """Remove the entry of a freed buffer, unless a new buffer has taken the same address."""
    known = flats.by_address.get(address)
    if known is not None and known.tensor is reference:
        del flats.by_address[address]
        flats.addresses.remove(address)
