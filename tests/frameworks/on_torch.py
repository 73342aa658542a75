"""Run an unedited program on PyTorch's own FSDP: ``-m tests.frameworks.on_torch program.py``.

So that the two runs differ in nothing but the engine, two things that ``patch_torch`` does for
programs on CPUs are done here as well. Accelerate, which takes DDP on CPUs whatever it is asked
for, shards; and FSDP1, which is told ``device_id=cpu:0`` then, does not compare that with ``cpu``.
"""

from __future__ import annotations

import runpy
import sys
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from fullshard.compat.accelerate_cpu import ShardsOnCpus

theirs = FullyShardedDataParallel.__init__


@wraps(theirs)
def without_a_number(self: Any, *args: Any, **options: Any) -> None:
    if getattr(options.get("device_id"), "type", None) == "cpu":
        options["device_id"] = torch.device("cpu")
    theirs(self, *args, **options)


if __name__ == "__main__":
    ShardsOnCpus()
    FullyShardedDataParallel.__init__ = without_a_number
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
