"""Backward in two threads of autograd.

Programs that need a second device run in processes of their own, as a process keeps that device.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = [
    node.name
    for node in ast.parse((ROOT / "tests" / "lanes" / "queues.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and node.decorator_list
]
"""Their names are read, not imported: this process is to know one device."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_threads_of_autograd(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.lanes.queues", name],
        cwd=ROOT,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_there_are_programs() -> None:
    assert len(PROGRAMS) >= 4
