"""Records that the ``datasets`` library reads: tables, and folders that name their data."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigError
from fullshard.train.extras import imported

TABLES = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".arrow": "arrow"}
"""Extensions of tables, with the name of their reader in the library."""

COLUMNS = ("text", "messages", "tools")
"""The columns to read, if present."""

_FRONT = re.compile(r"---\s*\n(.*?)\n---", re.DOTALL)

Rows = Iterator[tuple[int, dict[str, Any]]]
"""Numbers of rows, and their values by column."""


def describes_itself(root: Path) -> bool:
    """Return whether the folder names its data: in its README, or as ``save_to_disk`` does."""
    readme = root / "README.md"
    front = _FRONT.match(readme.read_text(errors="replace")) if readme.is_file() else None
    return _is_saved(root) or (front is not None and bool(re.search(r"(?m)^configs:", front[1])))


def _is_saved(root: Path) -> bool:
    there = {path.name for path in root.glob("*.json")}
    return "dataset_dict.json" in there or {"dataset_info.json", "state.json"} <= there


def splits_in(root: Path) -> dict[str, Rows]:
    """Return the rows of a folder that names its data, by the name of the split.

    Raises:
        ConfigError: the library is not installed, or cannot read the folder.
    """
    library = _library(root)
    place = str(root.resolve())  # a relative path may be the name of a reader
    with _reading(root):
        if _is_saved(root):
            found = library.load_from_disk(place)
        else:
            found = library.load_dataset(place, streaming=True)
    splits: Mapping[str, Any] = found if isinstance(found, dict) else {"rows": found}
    return {name: _rows(rows, root) for name, rows in splits.items()}


def table_in(path: Path, kind: str) -> Rows:
    """Yield the rows of a table with the extension ``kind``; CSV and parquet may be compressed.

    Args:
        path: the file.
        kind: its extension, a key of ``TABLES``.

    Raises:
        ConfigError: the library is not installed, or cannot read the file.
    """
    library = _library(path)
    options: dict[str, Any] = {}
    if TABLES[kind] == "csv":  # by default "NA" is no text, and "1" is a number
        options = {"sep": "\t" if kind == ".tsv" else ",", "keep_default_na": False}
        options["converters"] = {"text": str}
    place = glob.escape(str(path.resolve()))
    with _reading(path):
        rows = library.load_dataset(
            TABLES[kind], data_files=place, split="train", streaming=True, **options
        )
    yield from _rows(rows, path)


def _library(where: Path) -> Any:
    library = imported("datasets", f"--data {where}", extra="datasets")
    library.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else each call sends a request
    return library


def _rows(rows: Any, where: Path) -> Rows:
    with _reading(where):
        if (names := rows.column_names) is not None:
            rows = rows.select_columns([name for name in names if name in COLUMNS])
        yield from enumerate(rows if names is None or rows.column_names else ())
    if names is not None and not rows.column_names:
        raise ConfigError(
            f"--data {where}: has none of the columns {', '.join(COLUMNS)}; found "
            f"{', '.join(names)}"
        )


@contextmanager
def _reading(where: Path) -> Iterator[None]:
    """Raise ``ConfigError`` for any error of the library in the block."""
    try:
        yield
    except Exception as error:  # of many classes
        reason = " ".join(str(error.__cause__ or error).split())[:300] or type(error).__name__
        raise ConfigError(
            f"--data {where}: cannot be read by the datasets library ({reason})"
        ) from error
