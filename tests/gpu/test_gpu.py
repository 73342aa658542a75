"""Runs the parts of ``bench.gpu`` that pass or fail; they need a CUDA device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from bench import gpu

MEASURED = {"kernels", "offload", "speed"}
"""Parts that only measure, and cannot fail."""

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device: overlap of communication and compute on real streams, the caching "
    "allocator's bytes, and NCCL collectives are NOT tested in this run",
)


@pytest.mark.parametrize("name", [name for name in gpu.PARTS if name not in MEASURED])
def test_a_part_passes(name: str) -> None:
    """Each part runs in a process of its own, so that a fault does not affect the next part."""
    command = [sys.executable, "-m", "bench", "gpu", name]
    limit_s = gpu.PARTS[name].limit_s + 60
    done = subprocess.run(
        command, env=os.environ.copy(), capture_output=True, text=True, timeout=limit_s, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
