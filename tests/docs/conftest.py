"""The built site, once for all tests of a session."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from tests.docs.browser import Browser, chromium, opened

ROOT = Path(__file__).parents[2]
WITHOUT_A_NETWORK = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as ``make docs`` does, within a minute and without a warning."""
    pytest.importorskip("sphinx", reason="the site needs the extra: pip install '.[docs]'")
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # common to all workers
    out, built = folder / "site", folder / "site.built"
    with FileLock(folder / "site.lock"):
        if not built.exists():
            command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "--quiet"]
            done = subprocess.run(
                [*command, ROOT / "docs", out],
                env=os.environ | WITHOUT_A_NETWORK,
                timeout=300,
                capture_output=True,
                text=True,
            )
            assert (done.returncode, done.stderr) == (0, "")
            built.touch()
    return out


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if chromium() is None:
        pytest.skip("no Chromium: the pages are NOT TESTED in a browser")
    with opened(tmp_path_factory.mktemp("profile")) as started:
        yield started
