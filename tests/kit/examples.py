"""Programs of the docs and examples, started as in a shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.noise import without_noise

ROOT = Path(__file__).parents[2]


EXAMPLES = ROOT / "examples"


TIMEOUT_S = 180.0  # a start takes ten seconds, and many more on a loaded machine


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


FROM_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run(folder: Path, *arguments: str, logged: str = "") -> str:
    """Run Python in ``folder``; return its output, and fail if stderr does not match ``logged``."""
    environment = {k: v for k, v in os.environ.items() if k not in FROM_A_LAUNCHER}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher ends its workers
        out, err = process.communicate(timeout=TIMEOUT_S)
        pytest.fail(f"no end after {TIMEOUT_S} s\n{out}\n{err}")
    err = without_noise(err)
    if process.returncode and _ABORTED_AT_THE_END in err:
        return out
    assert process.returncode == 0 and re.fullmatch(logged, err), out + err
    return out


# One in four processes that saved with torch.distributed.checkpoint aborts after all its work, when
# the interpreter is gone and C++ destroys static objects. See docs/limits.md.
_ABORTED_AT_THE_END = "terminate called without an active exception"
