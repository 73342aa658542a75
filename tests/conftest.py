"""What every kind of test shares."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from tests.ranks.pool import RankPool
from tests.selection import MANY, covering

# The machines that run this have few cores, and one torch thread gives the same sums everywhere.
torch.set_num_threads(1)

# PyTorch's stores ask for the names of who connects; a name server that is slow to answer, for 5 s
# if nobody says otherwise, has no say in what is tested.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# The same examples on every run, and no time limit an example could miss on a loaded machine.
settings.register_profile("fullshard", derandomize=True, deadline=None)
settings.load_profile("fullshard")

FIGURES = pytest.StashKey[Counter[str]]()
"""What the checker of lanes looked at."""


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Iterator[RankPool]:
    """The session's gloo processes, if a test asks for them; the first ``pool.run`` starts them.

    Jobs run under the same warning filters as the tests, so that a warning on a rank fails too.
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
    """Keep what the trainer caches in the folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="every variant of every test, see tests/selection.py"
    )
    parser.addoption(
        "--lanes", action="store_true", help="look for races in jobs on ranks, see tests/lanes"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = Counter()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """What the checker looked at, on all ranks."""
    figures = config.stash[FIGURES]
    if figures:
        said = ", ".join(f"{number:,} {what}" for what, number in sorted(figures.items()))
        terminalreporter.write_line(f"under the checker of lanes: {said}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tests on ranks with many variants leave enough to run, unless files were asked for.

    Without those that are marked ``more``.
    """
    if config.getoption("--all") or config.getoption("keyword") or _names_a_file(config):
        return
    left_out = {item for item in items if item.get_closest_marker("more")}
    alike: dict[str, list[pytest.Function]] = {}
    for item in items:
        is_on_ranks = isinstance(item, pytest.Function) and item.nodeid.startswith("tests/ranks/")
        if is_on_ranks and item not in left_out:
            alike.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for variants in alike.values():
        if len(variants) > MANY:
            chosen = covering([tuple(item.callspec._idlist) for item in variants])
            left_out.update(item for n, item in enumerate(variants) if n not in chosen)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    # First, as at the end workers take tests from each other: tests that share a run of the
    # command would be split between two workers, and each would make that run.
    items.sort(key=lambda item: "shell" not in getattr(item, "fixturenames", ()))


def _names_a_file(config: pytest.Config) -> bool:
    return any(".py" in argument for argument in config.args)
