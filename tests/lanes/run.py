"""Runs programs in one process, which plays rank 0, under the checker.

python -m tests.lanes.run [NAME ...]
"""

from __future__ import annotations

import sys
import warnings

import torch

from tests.lanes.checked import checked
from tests.lanes.clocks import RaceError
from tests.lanes.programs import PROGRAMS
from tests.lanes.solo import solo


def first_failure() -> str:
    """The first program that fails, and how; empty: none."""
    for program in PROGRAMS:
        try:
            with solo(program.world):
                checked(program.run)
        except RaceError:
            return program.name
        except Exception as error:
            return f"{program.name} ({type(error).__name__})"
    return ""


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    for program in PROGRAMS:
        if not names or program.name in names:
            with warnings.catch_warnings(action="ignore"), solo(program.world):
                figures = checked(program.run).figures
            said = ", ".join(f"{number:,} {what}" for what, number in sorted(figures.items()))
            print(f"{program.name}: {said}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
