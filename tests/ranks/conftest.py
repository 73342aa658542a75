"""Fixtures that several test files of this folder share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a ``Shell`` of train_shell.py in a folder with a little text to train on."""
    from tests.ranks.train_shell import Shell

    return Shell.with_a_little_text(tmp_path_factory.mktemp("train"))
