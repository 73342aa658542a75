"""Runs the programs in one process until one fails; for ``mutations``, and to look at one program.

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


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for program in PROGRAMS:
        if names and program.name not in names:
            continue
        try:
            with solo(program.world):
                figures = checked(program.run).figures
        except RaceError as error:
            kind = "a race" if not isinstance(error.__cause__, Exception) else "an error"
            print(f"CAUGHT {program.name}: {kind}\n{error}")
            return 1
        except Exception as error:
            print(f"CAUGHT {program.name}: {type(error).__name__}\n{error}")
            return 1
        if names:
            print(program.name, dict(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
