"""Rows of tokens that a model reads: windows of a long text, or samples packed side by side."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]  # 1D
Indices = npt.NDArray[np.int64]

IGNORED = -100  # the label that cross entropy leaves out


class Batch(NamedTuple):
    """Rows of ``T`` tokens for one forward.

    Attributes:
        tokens: ``[B, T]``.
        labels: the token after each token, ``[B, T]``; ``IGNORED`` if it is not learned.
        positions: position of each token in its sample, ``[B, T]``, which separates the samples
            of a row; None if a row is one sample.
    """

    tokens: Indices
    labels: Indices
    positions: Indices | None

    def tensors(self) -> list[Tensor]:
        """Return tokens, labels and, if a row may be several samples, positions; on the CPU."""
        return [torch.from_numpy(values) for values in self if values is not None]


@dataclass(frozen=True)
class Windows:
    """A text cut into rows of ``seq`` tokens; every token but the first is learned."""

    tokens: Tokens
    seq: int

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq)

    def read(self, rows: Indices) -> Batch:
        """Return these rows. The label of a row's last token is the first of the next row."""
        starts = rows[:, None] * self.seq
        windows: Indices = self.tokens[starts + np.arange(self.seq + 1)].astype(np.int64)
        return Batch(windows[:, :-1], windows[:, 1:], None)

    def num_learned(self, rows: Indices) -> int:
        """Return how many labels of these rows are not ``IGNORED``."""
        return len(rows) * self.seq


@dataclass(frozen=True)
class Packed:
    """Samples side by side in rows of ``seq`` tokens, each whole unless it is longer than a row.

    Attributes:
        tokens: tokens of all samples, one after the other.
        starts: start of each sample in ``tokens``, and the end of the last.
        learned: for each of ``tokens``, whether it is to be learned.
        seq: number of tokens in a row.
        padding: the token after the last sample of a row.
        alone: whether a row has only one sample, for models without positions. A causal model
            does not see the padding after the sample.
    """

    tokens: Tokens
    starts: Indices
    learned: npt.NDArray[np.bool_]
    seq: int
    padding: int
    alone: bool = False

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_cut(self) -> int:
        """Number of samples that are cut because they are longer than a row."""
        return int((np.diff(self.starts) > self.seq + 1).sum())

    def read(self, rows: Indices) -> Batch:
        """Return these rows. After the last sample of a row, all positions are 0."""
        shape = (len(rows), self.seq)
        tokens, labels = np.full(shape, self.padding), np.full(shape, IGNORED)
        positions = np.zeros(shape, np.int64)
        for at, row in enumerate(rows):
            end = 0
            for sample in self._rows[row]:
                start, size = int(self.starts[sample]), int(self._sizes[sample])
                own = at, slice(end, end + size)
                read = self.tokens[start : start + size + 1].astype(np.int64)
                learned = self.learned[start + 1 : start + size + 1]
                tokens[own], labels[own] = read[:-1], np.where(learned, read[1:], IGNORED)
                positions[own] = np.arange(size)
                end += size
        return Batch(tokens, labels, None if self.alone else positions)

    def num_learned(self, rows: Indices) -> int:
        """Return how many labels of these rows are not ``IGNORED``."""
        return int(self._num_learned_of_rows[rows].sum())

    @cached_property
    def _sizes(self) -> Indices:
        """Places that each sample takes in a row; its last token is only a label."""
        sizes: Indices = np.clip(np.diff(self.starts) - 1, 0, self.seq)
        return sizes

    @cached_property
    def _num_learned(self) -> Indices:
        """Labels of each sample that are learned."""
        found = np.zeros(len(self._sizes), np.int64)
        some = np.flatnonzero(self._sizes)
        firsts = self.starts[some] + 1
        bounds = np.stack([firsts, firsts + self._sizes[some]], axis=1).ravel()
        if len(bounds):
            # reduceat sums from each bound to the next; every second sum belongs to a sample.
            bounds = bounds[:-1] if bounds[-1] == len(self.learned) else bounds
            found[some] = np.add.reduceat(self.learned, bounds, dtype=np.int64)[::2]
        return found

    @cached_property
    def _rows(self) -> list[list[int]]:
        """Samples of each row; those from which nothing can be learned are left out."""
        useful = np.flatnonzero(self._num_learned)
        if self.alone:
            return [[sample] for sample in useful.tolist()]
        rows = pack(self._sizes[useful].tolist(), self.seq)
        return [useful[row].tolist() for row in rows]

    @cached_property
    def _num_learned_of_rows(self) -> Indices:
        return np.array([self._num_learned[row].sum() for row in self._rows], np.int64)


Rows = Windows | Packed
"""Numbered rows; the length is the number of rows."""


def pack(sizes: list[int], capacity: int) -> list[list[int]]:
    """Put pieces into rows of ``capacity``: the largest first, each where the least space is left.

    Args:
        sizes: sizes of the pieces, from 1 to ``capacity``.
        capacity: size of a row.

    Returns:
        The indices of the pieces in each row.
    """
    rows: list[list[int]] = []
    by_space: dict[int, list[int]] = {}  # rows by their free space
    spaces: list[int] = []  # keys of ``by_space``, sorted
    for piece in sorted(range(len(sizes)), key=lambda piece: -sizes[piece]):
        size = sizes[piece]
        at = bisect_left(spaces, size)
        if at == len(spaces):
            row, space = len(rows), capacity
            rows.append([])
        else:
            space = spaces[at]
            row = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[at]
        rows[row].append(piece)
        if space > size:
            if space - size not in by_space:
                insort(spaces, space - size)
            by_space.setdefault(space - size, []).append(row)
    return rows
