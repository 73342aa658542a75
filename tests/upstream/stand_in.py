"""Run PyTorch's tests of one file on a CPU.

    python -m tests.upstream.stand_in ENGINE FILE WORD TIMEOUT_S AT_ONCE

A line of JSON is printed for each test. Every test runs in a fork of this process, which has
imported PyTorch and the file once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import unittest
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple

import torch
from torch.distributed.fsdp import _init_utils
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal import common_distributed, common_fsdp, common_utils

RANKS = int(os.environ.get("RANKS", "2"))
SKIPPED = 77
ON_A_CPU = (
    (r"return min_world_size\n", f"return min({RANKS}, min_world_size)\n"),
    (r"@unittest\.skipIf\(not TEST_CUDA.*\)\n", "\n"),
    (r'torch\.device\("cuda"[^()]*\)|torch\.cuda\.current_device\(\)', 'torch.device("cpu")'),
    (r'f"cuda:\{[^}]*\}"|"cuda(:\d)?"', '"cpu"'),
    (r"\.cuda\([\w.]*\)", ".cpu()"),
    (r"\.to\((self\.)?rank\)", ".cpu()"),
    (r"device=(self\.)?rank\b", 'device="cpu"'),
    (r'(device_id=|"device_id": )(self\.)?rank\b', r'\1torch.device("cpu")'),
    (r'"nccl"', '"gloo"'),
    (r"\bCUDAInitMode\b", "DEVICEInitMode"),
    (r"\bCUDA_(BEFORE|AFTER|NEVER)\b", r"DEVICE_\1"),
    (r"\bcuda_init_mode\b", "device_init_mode"),
)
"""Substitutions in the text of an imported file, which remove the names of GPUs."""


class Result(NamedTuple):
    """The result of a test on one engine: ok, skipped, FAILED or hangs; and its last error."""

    test: str
    what: str
    error: str = ""


def _always(*_: Any, **__: Any) -> Callable[[Any], Any]:
    """Replace a decorator that skips tests without accelerators."""
    return lambda test: test


def on_a_cpu() -> None:
    """Make PyTorch's test helpers find ``RANKS`` devices, all of which are the CPU."""
    common_fsdp.DEVICE_TYPE = "cpu"
    common_fsdp.DISTRIBUTED_BACKEND = "gloo"
    common_fsdp.DEVICE_COUNT = RANKS
    common_fsdp.get_devtype = _cpu
    for module in (torch.accelerator, torch.cpu, torch.cuda):
        module.device_count = lambda: RANKS  # type: ignore[assignment]
    for name in ("set_device", "synchronize", "manual_seed_all", "set_device_index"):
        for module in (torch.accelerator, torch.cuda):
            setattr(module, name, lambda *_: None)
    torch.cpu._sleep = lambda *_: None  # type: ignore[attr-defined]
    torch.cuda.can_device_access_peer = lambda *_: False  # type: ignore[assignment]
    torch.accelerator.current_device_index = lambda: 0  # type: ignore[assignment]
    torch.accelerator.current_accelerator = _cpu  # type: ignore[assignment]
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign, assignment]
    skips = "skip_if_lt_x_gpu requires_nccl requires_accelerator_dist_backend requires_gloo"
    for name in skips.split():
        setattr(common_distributed, name, _always)
    for name in ("MI200_ARCH", "device_sleep", "skip_if_rocm_arch_multiprocess"):
        for module in (common_utils, common_distributed):  # names that only some versions have
            if not hasattr(module, name):
                setattr(module, name, () if name.isupper() else _always)
    # Ranks are forked, because a spawned rank would import the file without these changes.
    multiprocessing.set_start_method("fork", force=True)
    common_distributed.MultiProcessTestCase._spawn_processes = _forked  # type: ignore[method-assign]
    _fsdp1_on_a_cpu()


def _fsdp1_on_a_cpu() -> None:
    """Make PyTorch's FSDP1 and DDP ignore GPU devices in their arguments."""
    plain_handle, plain_init = _init_utils._init_device_handle, DistributedDataParallel.__init__

    def handle(state: Any, module: Any, ignored: Any, device_id: Any) -> Any:
        return plain_handle(state, module, ignored, torch.device("cpu"))

    def init(self: Any, *args: Any, device_ids: Any = None, **options: Any) -> None:
        plain_init(self, *args, **options)

    from torch.distributed.fsdp import fully_sharded_data_parallel

    for module in (_init_utils, fully_sharded_data_parallel):
        module._init_device_handle = handle  # type: ignore[attr-defined]
    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


def _forked(self: Any, world_size: int | None = None, **options: Any) -> None:
    process = multiprocessing.get_context("fork").Process
    self._start_processes(process, **options)


def load(file: Path) -> ModuleType:
    """Import a test file under its own name, with the substitutions."""
    text = file.read_text()
    for pattern, words in ON_A_CPU:
        text = re.sub(pattern, words, text)
    module = module_from_spec(ModuleSpec(file.stem, None, origin=str(file)))
    module.__file__ = str(file)
    sys.modules[file.stem] = module
    exec(compile(text, str(file), "exec"), module.__dict__)
    return module


def _cpu(*_: Any, **__: Any) -> torch.device:
    return torch.device("cpu")


def _tests_in(suite: Any) -> Iterator[unittest.TestCase]:
    for one in suite:
        if isinstance(one, unittest.TestSuite):
            yield from _tests_in(one)
        else:
            yield one


class _Running(NamedTuple):
    name: str
    pid: int
    printed: IO[bytes]
    until_s: float


def _start(name: str, test: unittest.TestCase, timeout_s: float) -> _Running:
    printed = tempfile.TemporaryFile()  # noqa: SIM115
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        status = 1
        try:
            suite = unittest.TestSuite([test])
            result = unittest.TextTestRunner(stream=sys.stderr).run(suite)
            status = SKIPPED if result.skipped else 0 if result.wasSuccessful() else 1
        finally:
            sys.stderr.flush()
            os._exit(status)
    return _Running(name, pid, printed, time.monotonic() + timeout_s)


def _ended(one: _Running) -> Result | None:
    pid, status = os.waitpid(one.pid, os.WNOHANG)
    if pid == 0:
        if time.monotonic() < one.until_s:
            return None
        os.killpg(one.pid, 9)
        os.waitpid(one.pid, 0)
        return Result(one.name, "hangs", "it did not end in time")
    with suppress(ProcessLookupError):
        os.killpg(one.pid, 9)  # end the ranks that it left behind
    what = {0: "ok", SKIPPED: "skipped"}.get(os.waitstatus_to_exitcode(status), "FAILED")
    if what != "FAILED":
        return Result(one.name, what)
    one.printed.seek(0)
    printed = one.printed.read().decode(errors="replace")
    errors = re.findall(r"^\w[\w.]*(?:Error|Exception|Warning|Exit|Skip)\b.*$", printed, re.M)
    own = [error for error in errors if "exited with" not in error and "Process" not in error]
    return Result(one.name, what, (own or errors or [printed[-200:]])[-1])


def main(engine: str, file: str, word: str, timeout_s: float, at_once: int) -> None:
    """Run the tests of a file whose names contain ``word``."""
    on_a_cpu()
    if engine == "fullshard":
        import fullshard
        from fullshard.compat import patch_torch

        patch_torch()
        # PyTorch's common test code reads a private state before it compares anything.
        fullshard.FullyShardedDataParallel._assert_state = lambda *_: None  # type: ignore[attr-defined]
    path = Path(file)
    suite = unittest.defaultTestLoader.loadTestsFromModule(load(path))
    named = ((one.id().removeprefix(f"{path.stem}."), one) for one in _tests_in(suite))
    left = [(name, one) for name, one in named if word in name]
    running: list[_Running] = []
    while left or running:
        while left and len(running) < at_once:
            running.append(_start(*left.pop(0), timeout_s))
        time.sleep(0.02)
        for one in list(running):
            result = _ended(one)
            if result is not None:
                running.remove(one)
                print(json.dumps(result._asdict()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4], float(sys.argv[4]), int(sys.argv[5]))  # type: ignore[call-arg]
