"""Step time and bytes on a slow network, by ``WirePolicy``: namespaces as hosts, see ``cluster``.

Bytes are those of a host's interface, beside the bytes that gathers and reductions need.
"""

from __future__ import annotations

from typing import Any

from bench import cluster
from bench.cluster import SLACK, Case
from bench.compare import verdict
from bench.contenders import RAGGED, WIRES
from bench.machine import table

CASE = Case(2, 1, 1000)
NAMES = (RAGGED, *WIRES)
BOUND = 0.6
"""Largest share of the step in fp32 that is aimed at, with int8 gathers and bf16 gradients."""
BOUNDED = "gather=int8,reduce=bf16"

# Of what is sent in fp32: gathers are two thirds, since blocks are gathered twice. A block of 64
# takes 64 bytes and a scale of four.
_GATHER = {"int8": 68 / 256}
_REDUCE = {"bf16": 1 / 2, "int8": 68 / 256}


def share_of_bytes(text: str, gathers: float) -> float:
    """Of what fp32 sends, what a policy sends, if ``gathers`` of it is gathered."""
    kinds = dict(part.split("=") for part in text.split(","))
    gathered, reduced = kinds.get("gather"), kinds.get("reduce")
    return gathers * _GATHER.get(str(gathered), 1) + (1 - gathers) * _REDUCE.get(str(reduced), 1)


def figures() -> dict[str, Any]:
    """Shares of the step in fp32, and bytes."""
    return cluster.figures([CASE], NAMES)


def report(found: dict[str, Any]) -> int:
    """Print the table; how many bounds were missed."""
    missed = []
    for case, one in found.items():
        plain = one["megabytes"][RAGGED]
        gathers = one["gathers"]
        print(f"{case}; fp32 takes {one['seconds of the first']:.3f} s a step\n")
        rows = []
        for name in NAMES:
            share = 1 if name == RAGGED else share_of_bytes(name, gathers)
            sent, needed = one["megabytes"][name], plain * share
            rows.append([name, f"{one['step'][name]:.2f}", f"{sent:.1f}", f"{needed:.1f}"])
            if abs(sent / needed - 1) > SLACK:
                missed.append(f"{name}: {sent:.1f} MB")
        print(table(["wire", "step", "megabytes sent", "by arithmetic"], rows), end="\n\n")
        if one["step"][BOUNDED] > BOUND:
            missed.append(f"{BOUNDED}: {one['step'][BOUNDED]:.2f} (bound {BOUND})")
    return verdict(missed)
