"""A plugin of pytest that records, for each test, the blocks that it enters and its time.

Each worker of pytest has a file. All processes that it starts map this file, including ranks that
are killed later. The plugin clears the file before a test and reads it after the test. Blocks that
a shared fixture enters count for the first test that uses it.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(os.environ["FULLSHARD_RECORDS"])
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "alone")
_failed: set[str] = set()
_skipped: set[str] = set()


def _mapped() -> mmap.mmap:
    path = FOLDER / f"{_WORKER}.entered"
    path.write_bytes(bytes(int(os.environ["FULLSHARD_BLOCKS"])))
    os.environ["FULLSHARD_ENTERED"] = str(path)
    return mmap.mmap(os.open(path, os.O_RDWR), 0)


_entered = _mapped()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    lines = [line for path in FOLDER.glob("*.jsonl") for line in path.read_text().splitlines()]
    known = {json.loads(line)["test"] for line in lines}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in known])
    items[:] = [item for item in items if item.nodeid not in known]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _entered[:] = bytes(len(_entered))
    start = time.perf_counter()
    result = yield
    record = {
        "test": item.nodeid,
        "seconds": time.perf_counter() - start,
        "failed": item.nodeid in _failed,
        "skipped": item.nodeid in _skipped,
        # A copy, because ranks may still write to the memory.
        "blocks": np.flatnonzero(np.frombuffer(_entered[:], np.uint8)).tolist(),
    }
    with (FOLDER / f"{_WORKER}.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed.add(report.nodeid)
    if report.skipped:
        _skipped.add(report.nodeid)
