"""Fixtures and options that all kinds of tests share."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from tests.ranks.pool import RankPool
from tests.selection import BUDGETS, left_out

# Test machines have few cores, and with one torch thread sums are equal everywhere.
torch.set_num_threads(1)

# PyTorch's stores look up the host names of their clients. Limit the time that a slow name server
# takes, 5 s by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# The same examples in every run, and no deadline that a loaded machine could miss.
settings.register_profile("fullshard", derandomize=True, deadline=None)
settings.load_profile("fullshard")

FIGURES = pytest.StashKey[Counter[str]]()
"""Counts of the lane checker."""


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Iterator[RankPool]:
    """The session's gloo processes; the first ``pool.run`` starts them.

    Jobs run under the warning filters of the tests, so that a warning on a rank fails too.
    """
    lanes = pytestconfig.stash[FIGURES] if pytestconfig.getoption("--lanes") else None
    filters = pytestconfig.getini("filterwarnings")
    with RankPool(warning_filters=filters, lanes=lanes) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def world_of_one() -> Iterator[None]:
    """Provide a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the trainer's cache in the folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--chosen", action="store_true", help="leave out the tests in tests/left_out.txt"
    )
    parser.addoption(
        "--lanes", action="store_true", help="look for races in jobs on ranks, see tests/lanes"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = Counter()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the counts of the lane checker on all ranks, and the time of each folder."""
    figures = config.stash[FIGURES]
    if figures:
        said = ", ".join(f"{number:,} {what}" for what, number in sorted(figures.items()))
        terminalreporter.write_line(f"under the checker of lanes: {said}")
    if config.getoption("--chosen"):
        _show_times(terminalreporter)


def _show_times(reporter: pytest.TerminalReporter) -> None:
    seconds: dict[str, float] = defaultdict(float)
    for report in (each for some in reporter.stats.values() for each in some):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.split("/")[1]] += report.duration
    for folder, budget in BUDGETS.items():
        reporter.write_line(f"tests/{folder}: {seconds[folder]:,.0f} s of work, budget {budget} s")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--chosen"):
        others = left_out()
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in others])
        items[:] = [item for item in items if item.nodeid not in others]
    # First, because at the end of a session workers steal tests: tests that share a run of the
    # command would be split between two workers, each of which would repeat the run.
    items.sort(key=lambda item: "shell" not in getattr(item, "fixturenames", ()))
