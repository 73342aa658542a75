"""Codecs: how values are made smaller before they travel, and made whole again where they arrive.

Both sides work on rows: 2-D tensors, one row for each rank that something goes to or comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

ENCODED = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that are made smaller; all others travel as they are."""

INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # which the stubs do not know

_EXACT = torch.float32
_TINY = torch.finfo(_EXACT).tiny  # the smallest scale: a block of zeros must not divide by zero
_ROW_NBYTES = 16  # what rows of bytes are a multiple of, as some backends want


@dataclass(frozen=True)
class Cast:
    """A codec that rounds fp32 to a narrower dtype; values of 16 bits travel as they are."""

    dtype: torch.dtype
    """The dtype of each element as it travels."""

    block = 1

    @property
    def for_means(self) -> Cast:
        """The codec of means: the same."""
        return self

    def encode(self, values: Sequence[Tensor], exact: int = 0) -> Tensor:
        """Return ``values``, ``[rows, n]`` each, joined and cast; ``exact`` has no effect."""
        joined = values[0] if len(values) == 1 else torch.cat(list(values), dim=1)
        return joined.to(self.dtype) if joined.itemsize > self.dtype.itemsize else joined

    def decode(self, sent: Tensor, outputs: Sequence[Tensor], exact: int = 0) -> None:
        """Decode ``sent`` into ``outputs``, ``[rows, n]`` each."""
        parts = sent.split([output.shape[1] for output in outputs], dim=1)
        for output, part in zip(outputs, parts, strict=True):
            output.copy_(part)


@dataclass(frozen=True)
class Blocks:
    """A codec that sends a byte or half of one for each element, and a scale for each ``block``.

    The scale is that of the largest element of a block; a block ends with its tensor, too. A row is

        quotients, whole blocks | scales | up to 15 bytes | exact elements in fp32

    If an element is not finite, no element of its block arrives finite. The error of an element is
    at most half a step. A step of int8 is 1/127 of the block's largest element. A step of int4 is
    1/7 of it, times 1 + 2^-8, because scales are in bf16. A step of fp8 (e4m3) is 1/8 of the
    element itself, or 2^-9 / 448 of the block's largest element if that is more.
    """

    kind: torch.dtype
    """``torch.int8``, ``torch.float8_e4m3fn``, or ``INT4``, two to a byte."""
    block: int
    """The number of elements that must stay together, where values are cut into slices."""

    dtype = None

    @property
    def for_means(self) -> Blocks:
        """The codec of means: int8 for int4, or means would be off by half as much again.

        Means were encoded before, and fewer sums make their errors smaller.
        """
        return replace(self, kind=torch.int8) if self._halves else self

    @property
    def _halves(self) -> bool:
        return self.kind is INT4

    @property
    def _top(self) -> float:
        """The largest quotient."""
        tops = {INT4: 7.0, torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
        return tops[self.kind]

    @property
    def _widths(self) -> tuple[int, torch.dtype]:
        """The bytes of a block's quotients, and the dtype of its scale."""
        return (self.block // 2, torch.bfloat16) if self._halves else (self.block, torch.float32)

    def nbytes(self, numels: Sequence[int], exact: int = 0) -> int:
        """Return the bytes of a row for tensors of ``numels`` columns, without exact ones."""
        num_blocks = sum(-(-numel // self.block) for numel in numels)
        width, scale = self._widths
        nbytes = num_blocks * (width + scale.itemsize) + exact * _EXACT.itemsize
        return -(-max(nbytes, 1) // _ROW_NBYTES) * _ROW_NBYTES

    def encode(self, values: Sequence[Tensor], exact: int = 0) -> Tensor:
        """See ``Cast``; the result is bytes. The last ``exact`` columns are not encoded."""
        *first, last = values
        numel = last.shape[1] - exact
        blocks = self._blocks([*first, last[:, :numel]])
        rows, num_blocks, _ = blocks.shape
        sizes = [*(one.shape[1] for one in first), numel]
        sent = torch.empty(rows, self.nbytes(sizes, exact), dtype=torch.uint8, device=last.device)
        quotients, scales, tail = self._parts(sent, num_blocks, exact)
        spare = torch.abs(blocks)
        if spare.dtype is not _EXACT:
            spare = spare.to(_EXACT)
        torch.div(spare.amax(-1), self._top, out=scales).clamp_min_(_TINY)
        torch.div(blocks, scales.unsqueeze(-1), out=spare)
        if not self.kind.is_floating_point:
            spare.round_()
        if self._halves:
            low, high = spare.chunk(2, -1)
            spare = low.add_(high, alpha=16)
        quotients.copy_(spare)
        if exact:
            tail.copy_(last[:, numel:])
        return sent

    def decode(self, sent: Tensor, outputs: Sequence[Tensor], exact: int = 0) -> None:
        """See ``Cast``; the last ``exact`` columns are not encoded."""
        *first, last = outputs
        numel = last.shape[1] - exact
        targets = [*first, last[:, :numel]]
        counts = [-(-target.shape[1] // self.block) for target in targets]
        quotients, scales, tail = self._parts(sent, sum(counts), exact)
        at = 0
        for target, count in zip(targets, counts, strict=True):
            whole = target
            if target.shape[1] % self.block:
                whole = target.new_empty(len(target), count * self.block)
            parts = whole.unflatten(1, (count, self.block))
            self._put(quotients[:, at : at + count], parts)
            parts.mul_(scales[:, at : at + count, None])
            if whole is not target:
                target.copy_(whole[:, : target.shape[1]])
            at += count
        if exact:
            last[:, numel:].copy_(tail)

    def _put(self, quotients: Tensor, parts: Tensor) -> None:
        """Write ``quotients`` into ``parts``, ``[rows, blocks, block]``, one to an element."""
        if self._halves:
            low, high = parts.chunk(2, -1)
            high.copy_(quotients).div_(16).round_()  # a byte is low + 16 * high, with |low| <= 7
            low.copy_(quotients).sub_(high, alpha=16)
        else:
            parts.copy_(quotients)

    def _parts(self, sent: Tensor, num_blocks: int, exact: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of ``sent``: quotients ``[rows, blocks, bytes]``, scales and exact ones."""
        width, scale = self._widths
        ends = num_blocks * width, num_blocks * (width + scale.itemsize)
        kind = torch.int8 if self._halves else self.kind
        quotients = sent[:, : ends[0]].view(kind).unflatten(1, (num_blocks, width))
        tail = sent[:, sent.shape[1] - exact * _EXACT.itemsize :].view(_EXACT)
        return quotients, sent[:, ends[0] : ends[1]].view(scale), tail

    def _blocks(self, values: Sequence[Tensor]) -> Tensor:
        """Return ``values``, side by side, as ``[rows, blocks, block]``; ends filled with zeros."""
        filled = [
            F.pad(one, (0, -one.shape[1] % self.block)) if one.shape[1] % self.block else one
            for one in values
        ]
        joined = filled[0] if len(filled) == 1 else torch.cat(filled, dim=1)
        return joined.view(len(joined), joined.shape[1] // self.block, self.block)


Codec = Cast | Blocks
"""A frozen value that says how values travel."""


def round_trip(codec: Codec, values: Tensor) -> Tensor:
    """Return what arrives of 2-D ``values``, in fp32."""
    arrived = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    codec.decode(codec.encode([values]), [arrived])
    return arrived
