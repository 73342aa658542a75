"""Files that appear when they are complete."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def appear(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` with a temporary path, and rename the complete file to ``path``."""
    unfinished = path.with_name(f"{os.getpid()}-{path.name}")
    try:
        write(unfinished)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
