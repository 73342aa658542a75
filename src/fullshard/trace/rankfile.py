"""The file that each rank of a trace writes, and the clocks of all ranks' files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigError

VERSION = 1

CLOCKS = (
    "Ranks are aligned by the wall clocks of their hosts: to microseconds on one host, between "
    "hosts as well as those clocks agree, with NTP some milliseconds. Durations do not depend on it"
)


def path_of(folder: Path, rank: int) -> Path:
    """Return the path of the file of ``rank``."""
    return folder / f"rank-{rank:05}.json"


def write(folder: Path, rank: int, found: Mapping[str, Any]) -> Path:
    """Write the file of ``rank`` into ``folder`` and return its path."""
    path = path_of(folder, rank)
    write_parts(path, [json.dumps({"version": VERSION, **found}, separators=(",", ":"))])
    return path


def write_parts(path: Path, parts: Iterable[str]) -> None:
    """Write a file of these parts atomically: a reader sees the whole file or no file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(parts)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_all(folder: str | Path) -> list[dict[str, Any]]:
    """Return the contents of the rank files in ``folder``, or in its folder ``trace``, by rank.

    Each gets ``shift_s``: seconds from the earliest start of a rank to its own start. Files with a
    rank beyond the world of rank 0's file belong to another run and are left out.

    Raises:
        ConfigError: the folder has no rank file, or one cannot be read.
    """
    root = Path(folder)
    paths = sorted(root.glob("rank-*.json")) or sorted((root / "trace").glob("rank-*.json"))
    if not paths:
        raise ConfigError(
            f"{root}: found no rank-00000.json there or in {root / 'trace'}; expected the folder "
            "that was given to fullshard.trace(model, folder), after its stop()"
        )
    ranks = [_read(path) for path in paths]
    ranks = [one for one in ranks if one["rank"] < ranks[0]["world"]]
    first_ns = min(one["started"]["wall_ns"] for one in ranks)
    for one in ranks:
        one["shift_s"] = (one["started"]["wall_ns"] - first_ns) / 1e9
    return ranks


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error}); trace again") from error
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise ConfigError(
            f"{path}: expected a rank's trace of version {VERSION}, as this fullshard writes; "
            "trace again, or read it with the version that wrote it"
        )
    return found
