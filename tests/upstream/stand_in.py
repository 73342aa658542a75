"""Run one of PyTorch's test files on a CPU: ``-m tests.upstream.stand_in ENGINE FILE TEST``."""

from __future__ import annotations

import multiprocessing
import sys
import unittest
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.testing._internal import common_distributed, common_fsdp, common_utils

from fullshard.compat import patch_torch

RANKS = 2


def _always(*_: Any, **__: Any) -> Callable[[Any], Any]:
    """Replace a decorator that skips tests for want of accelerators."""
    return lambda test: test


def on_a_cpu() -> None:
    """Change what PyTorch's tests ask about the machine: two devices, which are the CPU."""
    common_fsdp.DEVICE_TYPE = "cpu"
    common_fsdp.DISTRIBUTED_BACKEND = "gloo"
    common_fsdp.DEVICE_COUNT = RANKS
    common_fsdp.get_devtype = _cpu
    torch.accelerator.device_count = lambda: RANKS
    for name in ("skip_if_lt_x_gpu", "requires_nccl", "requires_accelerator_dist_backend"):
        setattr(common_distributed, name, _always)
    for name in ("MI200_ARCH", "device_sleep", "skip_if_rocm_arch_multiprocess"):
        for module in (common_utils, common_distributed):  # names of other versions
            if not hasattr(module, name):
                setattr(module, name, () if name.isupper() else _always)
    # Ranks are forked: a spawned one would import the file without these changes.
    multiprocessing.set_start_method("fork", force=True)
    common_distributed.MultiProcessTestCase._spawn_processes = _forked  # type: ignore[method-assign]


def _forked(self: Any, world_size: int | None = None, **options: Any) -> None:
    process = multiprocessing.get_context("fork").Process
    self._start_processes(process, **options)


def load(file: Path) -> ModuleType:
    """Import a test file as a module of its own."""
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[file.stem] = module
    # Files ask for the accelerator's type when they are imported.
    with mock.patch.object(torch.accelerator, "current_accelerator", _cpu):
        spec.loader.exec_module(module)
    return module


def _cpu(*_: Any, **__: Any) -> torch.device:
    return torch.device("cpu")


def names_in(file: Path) -> list[str]:
    """Return the tests of a file."""
    suite = unittest.defaultTestLoader.loadTestsFromModule(load(file))
    found: list[str] = []

    def walk(one: Any) -> None:
        if isinstance(one, unittest.TestSuite):
            for inner in one:
                walk(inner)
        else:
            found.append(one.id().removeprefix(f"{file.stem}."))

    walk(suite)
    return found


def main(engine: str, file: str, test: str) -> int:
    """Run one test, or print the names of all; return the exit status, 77 for a skipped test."""
    on_a_cpu()
    if engine == "fullshard":
        patch_torch()
    if test == "":
        print("\n".join(names_in(Path(file))))
        return 0
    module = load(Path(file))
    suite = unittest.defaultTestLoader.loadTestsFromName(test, module)
    result = unittest.TextTestRunner(stream=sys.stderr, verbosity=2).run(suite)
    return 77 if result.skipped else 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
