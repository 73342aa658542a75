"""Fixtures of several files of this folder."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a shell in a folder with a little text to train on, see train_shell.py."""
    from tests.ranks.train_shell import Shell

    return Shell.with_a_little_text(tmp_path_factory.mktemp("train"))
