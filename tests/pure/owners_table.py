"""Owners of the matrices of large models, by arithmetic: ``python -m tests.pure.owners_table``.

Prints the tables of ``docs/optimizers.md``: balance of costs, and bytes that a rank sends per step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from fullshard.optim.owned.assign import (
    Matrix,
    OwnedBlock,
    Shape,
    blocks_of,
    newton_schulz_flops,
    owners_of,
)
from fullshard.tensors.parts import chunk_of

RANKS = (64, 256, 1024)
NBYTES = 4  # per element: gradients, parameters and updates travel in fp32


class Parameter(NamedTuple):
    """A parameter that Muon steps, sharded on dim 0 by ``PerParameter``; 3-D ones hold experts."""

    shape: Shape
    is_stack: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def llama_3_70b() -> Iterator[Parameter]:
    """Yield the matrices of its 80 layers; AdamW steps the embedding and the head."""
    for _ in range(80):
        for shape in ((8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192)):
            yield Parameter(shape)
        for shape in ((28672, 8192), (28672, 8192), (8192, 28672)):
            yield Parameter(shape)


def deepseek_v3() -> Iterator[Parameter]:
    """Yield the matrices of 61 layers with latent attention, 58 of them with 256 experts."""
    for layer in range(61):
        for shape in ((1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384)):
            yield Parameter(shape)
        if layer < 3:
            for shape in ((18432, 7168), (18432, 7168), (7168, 18432)):
                yield Parameter(shape)
            continue
        for shape in ((2048, 7168), (2048, 7168), (7168, 2048)):
            yield Parameter((256, *shape), is_stack=True)
            yield Parameter(shape)  # the shared expert
        yield Parameter((256, 7168))  # the router


MODELS = {"Llama-3-70B": llama_3_70b, "DeepSeek-V3": deepseek_v3}


class Row(NamedTuple):
    """Figures of a model on a number of ranks.

    Attributes:
        balance: largest cost of a rank, divided by the mean.
        bound: cost of the largest matrix, divided by the mean; a lower bound of ``balance``.
        sent: bytes that a rank sends in a step, on average.
        everywhere: ``sent``, if every rank gathers every gradient.
        dealt: ``sent``, if matrices of equal shape are dealt round-robin, in rounds of one matrix a
            rank, and gradients and updates travel.
        dealt_balance: ``balance``, if matrices are dealt round-robin.
        grouped, grouped_balance: the same figures for the scheme of microsoft/dion, see
            ``_grouped``.
    """

    balance: float
    bound: float
    sent: int
    everywhere: int
    dealt: int
    dealt_balance: float
    grouped: int
    grouped_balance: float


def rows_of(block: OwnedBlock, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the first row of a block, and the row after its last."""
    inner = math.prod(shape[1:])
    return block.start // inner, (block.start + block.numel) // inner


@cache
def row(model: str, num_ranks: int) -> Row:
    """Return the figures of a model."""
    params = list(MODELS[model]())
    of_params = [
        blocks_of("", param.shape, lambda _, s: "each" if len(s) > 2 else None) for param in params
    ]
    numbers = [number for number, own in enumerate(of_params) for _ in own]
    blocks = [block for own in of_params for block in own]
    holders = []
    for number, block in zip(numbers, blocks, strict=True):
        rows = params[number].shape[0]
        chunk = -(-rows // num_ranks)
        start, stop = rows_of(block, params[number].shape)
        first, last = start // chunk, (stop - 1) // chunk
        holders.append((first,) if first == last else ())
    costs = [newton_schulz_flops(block.shape) for block in blocks]
    matrices = [Matrix(n, c, h) for n, c, h in zip(numbers, costs, holders, strict=True)]
    owners = owners_of(matrices, num_ranks)
    load = [0.0] * num_ranks
    kept = [0] * num_ranks  # elements that the owner already holds
    for number, block, owner, cost in zip(numbers, blocks, owners, costs, strict=True):
        load[owner] += cost
        rows, inner = params[number].shape[0], params[number].numel
        own = chunk_of(rows, num_ranks, owner)
        start, stop = rows_of(block, params[number].shape)
        both = min(own.stop, stop) - max(own.start, start)
        kept[owner] += max(both, 0) * (inner // rows)
    total = sum(param.numel for param in params)
    mean = sum(costs) / num_ranks
    dealt, padded = _dealt(params, num_ranks)
    grouped, exchanged = _grouped(params, num_ranks)
    return Row(
        balance=max(load) / mean,
        bound=max(costs) / mean,
        sent=3 * NBYTES * (total - sum(kept)) // num_ranks,
        everywhere=NBYTES * total * (num_ranks - 1) // num_ranks,
        dealt=2 * NBYTES * padded * (num_ranks - 1) // num_ranks**2,
        dealt_balance=max(dealt) / mean,
        grouped=2 * 2 * exchanged * (num_ranks - 1) // num_ranks**2,
        grouped_balance=max(grouped) / mean,
    )


def _dealt(params: list[Parameter], num_ranks: int) -> tuple[list[float], int]:
    """Deal matrices of equal shape round-robin; pad each round to one matrix a rank.

    A stack of experts counts as one matrix per expert, the best case for this scheme. Returns the
    cost of each rank, and the number of elements with padding.
    """
    counts: dict[Shape, int] = {}
    for param in params:
        shape = param.shape[1:] if param.is_stack else param.shape
        counts[shape] = counts.get(shape, 0) + (param.shape[0] if param.is_stack else 1)
    load, padded = [0.0] * num_ranks, 0
    for shape, count in counts.items():
        for rank in range(num_ranks):
            load[rank] += newton_schulz_flops(shape) * len(range(rank, count, num_ranks))
        padded += -(-count // num_ranks) * num_ranks * math.prod(shape)
    return load, padded


def _grouped(params: list[Parameter], num_ranks: int) -> tuple[list[float], int]:
    """Deal matrices as microsoft/dion's Muon does on FSDP2, which cuts dim 0 in equal chunks.

    For each shape, all ranks send their bf16 shards to the ranks that step the matrices. Zero
    matrices fill the number of matrices up to a multiple of the number of ranks, and zero rows do
    so for the rows of each matrix. Updates return in the same way. Each rank steps the experts in
    its own chunk of a stack, and sends nothing for them. Returns the cost of each rank, and the
    number of elements with padding.
    """
    counts: dict[Shape, int] = {}
    load, padded = [0.0] * num_ranks, 0
    for param in params:
        if param.is_stack:
            for rank in range(num_ranks):
                own = chunk_of(param.shape[0], num_ranks, rank)
                load[rank] += newton_schulz_flops(param.shape[1:]) * (own.stop - own.start)
        else:
            counts[param.shape] = counts.get(param.shape, 0) + 1
    for shape, count in counts.items():
        in_a_row = -(-count // num_ranks)  # the matrices of a rank are consecutive
        for rank in range(num_ranks):
            own = max(min(count - rank * in_a_row, in_a_row), 0)
            load[rank] += newton_schulz_flops(shape) * own
        rows = -(-shape[0] // num_ranks) * num_ranks
        padded += in_a_row * num_ranks * rows * math.prod(shape[1:])
    return load, padded


def table() -> str:
    """Return the table as Markdown."""
    lines = [
        "| model | ranks | cost max / mean | one matrix / mean | dealt | dion | GB | everywhere "
        "| dealt | dion |",
        f"| --- |{' ---: |' * 9}",
    ]
    for model in MODELS:
        for num_ranks in RANKS:
            one = row(model, num_ranks)
            sent = (one.sent, one.everywhere, one.dealt, one.grouped)
            sizes = " | ".join(f"{n / 1e9:.2f}" for n in sent)
            costs = f"{one.balance:.3f} | {one.bound:.3f}"
            costs += f" | {one.dealt_balance:.2f} | {one.grouped_balance:.2f}"
            lines.append(f"| {model} | {num_ranks} | {costs} | {sizes} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
