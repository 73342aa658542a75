"""Which tensors are parts of one flat buffer, and so neighbours in memory.

What users hold of a bucket are single tensors, each with a storage of its own. Whoever wants to
treat them as one, such as an optimizer, asks here: a flat buffer is announced when it is made, and
found again by the address of a part, as long as it lives.

    flat     | w w w w w w | . . | b b b |         parts (0, 6) and (8, 3); neighbours
    part     |      0      |     |   1   |         are parts with numbers that follow
"""

from __future__ import annotations

import weakref
from bisect import bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class FlatPart:
    """Where a tensor lies in a flat buffer.

    Attributes:
        flat: the 1-D buffer. Between neighbours it has only padding, which is nobody's.
        number: the part's number among the parts that are not empty, in the order of memory.
        start: first element in ``flat``.
        stop: one past the last element.
    """

    flat: Tensor
    number: int
    start: int
    stop: int

    def precedes(self, other: FlatPart) -> bool:
        """Whether ``other`` is the next part of the same buffer."""
        return self.flat is other.flat and self.number + 1 == other.number


@dataclass(frozen=True, slots=True)
class _Flat:
    """A buffer that lives, perhaps, and its parts."""

    tensor: weakref.ref[Tensor]
    parts: dict[int, tuple[int, int]]  # start: number, length


_flats: dict[tuple[torch.device, int], _Flat] = {}  # by the address of the first byte
_addresses: dict[torch.device, list[int]] = {}  # of all in ``_flats``, sorted


def announce_flat(flat: Tensor, parts: Iterable[tuple[int, int]]) -> None:
    """Let tensors in the memory of ``flat`` (1-D, never resized) be found as its parts.

    Args:
        flat: the buffer; it is not kept alive.
        parts: first element and number of elements of each part; empty ones are no parts.
    """
    if flat.is_meta or not flat.numel():
        return
    filled = sorted((start, length) for start, length in parts if length)
    numbered = {start: (number, length) for number, (start, length) in enumerate(filled)}
    device, address = flat.device, flat.data_ptr()
    if (device, address) not in _flats:
        insort(_addresses.setdefault(device, []), address)
    reference = weakref.ref(flat, lambda _: _forget(device, address, reference))
    _flats[device, address] = _Flat(reference, numbered)


def flat_part_of(tensor: Tensor) -> FlatPart | None:
    """The part that ``tensor``, contiguous and with all elements of it, is; None if it is none."""
    addresses = _addresses.get(tensor.device, ())
    address = tensor.data_ptr()
    at = bisect_right(addresses, address)
    if not at or not tensor.is_contiguous():
        return None
    first = addresses[at - 1]
    known = _flats[tensor.device, first]
    flat = known.tensor()
    start = (address - first) // tensor.itemsize
    number, length = known.parts.get(start, (0, 0))
    if flat is None or flat.dtype != tensor.dtype or length == 0 or length != tensor.numel():
        return None
    return FlatPart(flat, number, start, start + length)


def _forget(device: torch.device, address: int, reference: weakref.ref[Tensor]) -> None:
    """The buffer is gone, unless another one took its address in the meantime."""
    known = _flats.get((device, address))
    if known is not None and known.tensor is reference:
        del _flats[device, address]
        _addresses[device].remove(address)
