"""Run an unedited program on PyTorch's own FSDP: ``-m tests.frameworks.on_torch program.py``.

The two runs must differ in the engine alone, so this module repeats two changes that
``patch_torch`` makes for programs on CPUs. Accelerate shards on CPUs, where it would otherwise
choose DDP. FSDP1 gets ``device_id=cpu`` instead of ``cpu:0``, which it would refuse as unequal to
``cpu``.
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
