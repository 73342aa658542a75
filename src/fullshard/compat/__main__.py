"""Run an unedited program on fullshard: ``python -m fullshard.compat script.py arguments...``.

A launcher starts it in the same way: ``torchrun -m fullshard.compat script.py arguments...``. With
``-m package.module`` in place of the script, the module runs as ``python -m`` would run it.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from fullshard.compat import patch_torch

USAGE = "usage: python -m fullshard.compat (script.py | -m module) arguments..."


def main(arguments: Sequence[str]) -> int:
    """Run the program that ``arguments`` name, under ``patch_torch``; return the exit status."""
    by_name = list(arguments[:1]) == ["-m"]
    program = list(arguments[1:] if by_name else arguments)
    if not program or program[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if program else sys.stderr)
        return 0 if program else 2
    patch_torch()
    sys.argv[:] = program
    if by_name:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        return 0
    script = Path(program[0])
    if not sys.flags.safe_path:
        sys.path[0] = str(script.resolve().parent)  # where a script finds its neighbors
    runpy.run_path(str(script.absolute()), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
