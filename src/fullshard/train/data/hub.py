"""Records that the ``datasets`` library reads: tables, and folders that describe themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigError
from fullshard.train.extras import imported

TABLES = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".arrow": "arrow"}
"""Extensions of tables, with the name of their reader in the library."""

_SAVED = ("dataset_dict.json", "state.json")  # of ``Dataset.save_to_disk``
_FRONT = re.compile(r"---\s*\n(.*?)\n---", re.DOTALL)

Rows = Iterator[tuple[int, dict[str, Any]]]
"""Numbers of rows, and their values by column."""


def describes_itself(root: Path) -> bool:
    """Return whether the folder names its data: in its README, or as ``save_to_disk`` does."""
    if any((root / name).is_file() for name in _SAVED):
        return True
    readme = root / "README.md"
    front = _FRONT.match(readme.read_text(errors="replace")) if readme.is_file() else None
    return front is not None and re.search(r"^configs:", front[1], re.MULTILINE) is not None


def splits_in(root: Path) -> dict[str, Rows]:
    """Return the rows of a folder that describes itself, by the name of the split.

    Raises:
        ConfigError: the library is not installed, or cannot read the folder.
    """
    library = imported("datasets", f"--data {root}", extra="datasets")
    try:
        if any((root / name).is_file() for name in _SAVED):
            found = library.load_from_disk(str(root))
        else:
            found = library.load_dataset(str(root), streaming=True)
    except Exception as error:  # of many classes
        raise _cannot_be_read(root, error) from error
    splits: Mapping[str, Any] = found if isinstance(found, dict) else {"rows": found}
    return {name: _rows(rows, root) for name, rows in splits.items()}


def table_in(path: Path, kind: str) -> Rows:
    """Yield the rows of a table with the extension ``kind``; it may be compressed.

    Raises:
        ConfigError: the library is not installed, or cannot read the file.
    """
    library = imported("datasets", f"--data {path}", extra="datasets")
    options = {"sep": "\t"} if kind == ".tsv" else {}
    try:
        rows = library.load_dataset(
            TABLES[kind], data_files=str(path), split="train", streaming=True, **options
        )
    except Exception as error:  # of many classes
        raise _cannot_be_read(path, error) from error
    yield from _rows(rows, path)


def _rows(rows: Any, where: Path) -> Rows:
    try:
        yield from enumerate(rows)
    except Exception as error:  # of many classes
        raise _cannot_be_read(where, error) from error


def _cannot_be_read(where: Path, error: Exception) -> ConfigError:
    reason = str(error.__cause__ or error).strip().split("\n")[0]
    return ConfigError(f"--data {where}: cannot be read by the datasets library ({reason})")
