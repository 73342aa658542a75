"""Reading of ``--data`` (text files, JSONL and parquet) into named documents."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fullshard.errors import ConfigError

_SKIPPED_FOLDERS = frozenset(
    ["test", "tests", "encodings", "idlelib", "pydoc_data", "site-packages", "dist-packages"]
)
HELD_OUT_OF_256 = 16  # one document in sixteen
_FIELD = "text"  # field of a JSONL record, column of a parquet file


@dataclass(frozen=True, slots=True)
class Document:
    """One text; ``name`` is its file, relative to the given folder, and any record number."""

    name: str
    text: str

    @property
    def is_held_out(self) -> bool:
        """Return whether the document is kept for evaluation; only its name decides."""
        return hashlib.sha256(self.name.encode()).digest()[0] < HELD_OUT_OF_256


def collect(data: str | None) -> list[Document]:
    """Return the texts to train on, sorted by name.

    Args:
        data: a file, or a folder of which every UTF-8 file is read except hidden ones; of
            ``*.jsonl`` and ``*.parquet`` files, the field or column ``text`` of every record.
            ``None`` reads the ``*.py`` of Python's standard library, without tests and tables.

    Raises:
        ConfigError: the path is missing or holds no text, a record has no ``text``, or a JSONL or
            parquet file cannot be read.
    """
    if data is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [p for p in root.rglob("*.py") if not _SKIPPED_FOLDERS & _folders(p, root)]
    else:
        root = Path(data)
        if not root.exists():
            raise ConfigError(f"--data {data}: there is no such file or folder")
        files = [root] if root.is_file() else [p for p in root.rglob("*") if _is_visible(p, root)]
    folder = root.parent if root.is_file() else root
    documents = [
        document
        for path in files
        for document in _read(path, path.relative_to(folder).as_posix())
        if document.text
    ]
    if not documents:
        raise ConfigError(f"--data {data or root}: holds no text (UTF-8 files that are not empty)")
    return sorted(documents, key=lambda document: document.name)


def _read(path: Path, name: str) -> Iterator[Document]:
    if path.suffix == ".jsonl":
        texts = _read_jsonl(path)
    elif path.suffix == ".parquet":
        texts = _read_parquet(path)
    else:
        yield Document(name, _read_text(path))
        return
    for number, text in texts:
        yield Document(f"{name}:{number:09d}", text)  # names sort in file order


def _read_text(path: Path) -> str:
    """Return the file's exact text, or an empty string if the file is not text."""
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return ""
    return "" if "\0" in text else text


def _read_jsonl(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line numbers and texts, skipping empty lines."""
    try:
        lines = path.read_bytes().decode().split("\n")  # no splitlines: JSON may hold U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data {path}: cannot be read as UTF-8 ({error})") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"--data {path}, line {number}: not JSON ({error})") from error
        text = record.get(_FIELD) if isinstance(record, dict) else None
        if not isinstance(text, str):
            found = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise ConfigError(
                f'--data {path}, line {number}: expected an object with the field "{_FIELD}", '
                f"a string; found {found or 'nothing'}"
            )
        yield number, text.encode(errors="replace").decode()  # JSON may hold half a surrogate pair


def _read_parquet(path: Path) -> Iterator[tuple[int, str]]:
    """Yield row numbers and texts; a null becomes an empty text."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigError(
            f"--data {path} needs pyarrow: pip install 'fullshard[parquet]'"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            names = schema.names
            if _FIELD not in names:
                raise ConfigError(
                    f'--data {path}: expected a column "{_FIELD}", found {", ".join(names)}'
                )
            kind = schema.field(_FIELD).type
            if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
                raise ConfigError(f'--data {path}: column "{_FIELD}" holds {kind}, expected string')
            texts = file.read(columns=[_FIELD]).column(_FIELD).to_pylist()
    except (OSError, arrow.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--data {path}: cannot be read as parquet ({reason})") from error
    yield from ((number, text or "") for number, text in enumerate(texts))


def _folders(path: Path, root: Path) -> set[str]:
    return set(path.relative_to(root).parts[:-1])


def _is_visible(path: Path, root: Path) -> bool:
    return path.is_file() and not any(p.startswith(".") for p in path.relative_to(root).parts)
