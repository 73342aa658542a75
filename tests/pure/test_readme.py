"""The program on the README's first screen runs as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
FROM_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Write the README's only Python block to a file."""
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1
    path = tmp_path / "program.py"
    path.write_text(blocks[0])
    return path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in FROM_A_LAUNCHER}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, timeout=120, capture_output=True, text=True
    )


def test_it_takes_a_step_when_started_by_itself(program: Path) -> None:
    done = run(program.parent, str(program))
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""


PROOF = """
for param in model.parameters():
    assert param.to_local().shape[0] * 2 == param.shape[0]
for block in model:
    assert type(block).__name__ == "FSDPLinear"
    assert optimizer.state[block.weight]["step"].item() == 1
"""


def test_it_takes_a_step_on_two_ranks_of_torchrun_with_every_parameter_cut_in_two(
    program: Path,
) -> None:
    program.write_text(program.read_text() + PROOF)
    done = run(program.parent, *LAUNCHER, str(program))
    assert done.returncode == 0, done.stderr


def test_its_first_screen_shows_the_two_commands() -> None:
    first_screen = README.read_text().splitlines()[:30]
    assert any(line.startswith("make train") for line in first_screen)
    assert any(line.startswith("make test") for line in first_screen)
