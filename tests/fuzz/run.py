"""The function that every rank runs: cases one after the other."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fullshard.errors import FullshardError
from tests.fuzz.case import Case
from tests.fuzz.generate import generate
from tests.fuzz.sharding import forget_meshes
from tests.fuzz.twins import Twins


class CaseFailed(Exception):
    """A failed case; the message has its seed and step, and ``__cause__`` the error."""


def run_cases(cases: Sequence[int | Case], log: str) -> int:
    """Run seeds or given cases; rank 0 writes a line to ``log`` after each.

    The first failure ends the job, because the failed case may leave state that disturbs later
    cases.
    """
    forget_meshes()
    try:
        for one in cases:
            case = generate(one) if isinstance(one, int) else one
            refusals = perform(case)
            if dist.get_rank() == 0:
                done = {"seed": case.seed, "face": case.sharding.face, "refusals": refusals}
                with Path(log).open("a") as file:
                    file.write(json.dumps(done) + "\n")
    finally:
        forget_meshes()
    return len(cases)


def perform(case: Case) -> list[str]:
    """Run one case; return the kinds of its refusals, which are equal on all ranks."""
    refusals: list[str] = []
    number, step = -1, "(sharding)"
    try:
        try:
            twins = Twins(case)
        except FullshardError as error:
            return _agreed([f"{step}: {kind_of(error)}"])
        for index, one in enumerate(case.steps):
            number, step = index, one.op
            try:
                getattr(twins, one.op)(**one.options)
            except FullshardError as error:
                refusals.append(f"{one.op}: {kind_of(error)}")
                step += " refused"
                twins.check()
        step = "(end)"
        twins.check()
        return _agreed(refusals) if refusals else refusals
    except Exception as error:
        raise CaseFailed(f"seed {case.seed}, step {number} {step}: {kind_of(error)}") from error


def _agreed(refusals: list[str]) -> list[str]:
    """Check that all ranks refused the same; a rank without refusals makes this call time out."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, refusals)
    if any(one != refusals for one in everywhere):
        raise AssertionError(f"ranks refuse different things: {everywhere}")
    return refusals


def kind_of(error: BaseException) -> str:
    """Return the class and message of an error, without numbers and names."""
    text = str(error).splitlines()[0] if str(error) else ""
    text = re.sub(
        r"(\w+(\.\w+)+|(?<=parameter )\S+|'[^']*'|\d[\d.e+-]*|\[.*?\]|\(.*?\))", "#", text
    )
    return f"{type(error).__name__}: {text}"[:200]
