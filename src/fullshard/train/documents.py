"""Reading of ``--data`` (text files, JSONL and parquet) into named documents: texts or chats."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigError

_SKIPPED_FOLDERS = frozenset(
    ["test", "tests", "encodings", "idlelib", "pydoc_data", "site-packages", "dist-packages"]
)
HELD_OUT_OF_256 = 16  # one document in sixteen
# Fields of a JSONL record, columns of a parquet file.
_TEXT, _CHAT, _TOOLS = "text", "messages", "tools"


@dataclass(frozen=True, slots=True)
class Document:
    """A text or a chat.

    Attributes:
        name: its file, relative to the given folder, and any record number.
        text: the text; of a chat, its messages and tools as JSON.
        is_chat: whether it is a chat.
    """

    name: str
    text: str
    is_chat: bool = False

    @property
    def is_held_out(self) -> bool:
        """Return whether the document is kept for evaluation; only its name decides."""
        return self.digest[0] < HELD_OUT_OF_256

    @property
    def digest(self) -> bytes:
        """Return the hash of the name."""
        return hashlib.sha256(self.name.encode()).digest()


def collect(data: str | None) -> list[Document]:
    """Return the texts to train on, sorted by name.

    Args:
        data: a file, or a folder of which every UTF-8 file is read except hidden ones; of
            ``*.jsonl`` and ``*.parquet`` files, the field or column ``text`` of every record, or
            ``messages``: a chat, with its ``tools`` if there are any. ``None`` reads the ``*.py``
            of Python's standard library, without tests and tables.

    Returns:
        Texts only, or chats only.

    Raises:
        ConfigError: the path is missing or holds no text, a record has neither ``text`` nor
            ``messages``, there are texts beside chats, or a JSONL or parquet file cannot be read.
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
    chats = [document for document in documents if document.is_chat]
    if chats and len(chats) < len(documents):
        text = next(document for document in documents if not document.is_chat)
        raise ConfigError(
            f"--data {data or root}: {chats[0].name} is a chat and {text.name} is a text; give "
            "only chats or only texts"
        )
    return sorted(documents, key=lambda document: document.name)


def split(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Return the documents to train on and those held out.

    If choosing by name holds out much more or less than a sixteenth, as with few documents or one
    large document, the last sixteenth of every text is held out instead, or of chats the sixteenth
    with the smallest hashes.
    """
    train = [document for document in documents if not document.is_held_out]
    held_out = [document for document in documents if document.is_held_out]
    share = _size(held_out) / _size(documents)
    if 1 / 64 < share < 1 / 4:
        return train, held_out
    if documents[0].is_chat:
        by_hash = sorted(documents, key=lambda document: document.digest)
        number = max(1, len(documents) * HELD_OUT_OF_256 // 256)
        chosen = {document.name for document in by_hash[:number]}
        train = [document for document in documents if document.name not in chosen]
        return train, by_hash[:number]
    cuts = [len(document.text) * (256 - HELD_OUT_OF_256) // 256 for document in documents]
    pairs = list(zip(documents, cuts, strict=True))
    train = [replace(document, text=document.text[:cut]) for document, cut in pairs]
    return train, [replace(document, text=document.text[cut:]) for document, cut in pairs]


def _size(documents: Sequence[Document]) -> int:
    return sum(len(document.text) for document in documents)


def _read(path: Path, name: str) -> Iterator[Document]:
    if path.suffix not in (".jsonl", ".parquet"):
        yield Document(name, _read_text(path))
        return
    read = _read_jsonl if path.suffix == ".jsonl" else _read_parquet
    for number, record in read(path):
        own = f"{name}:{number:09d}"  # names sort in file order
        if _TEXT in record:
            yield Document(own, record[_TEXT])
        else:
            chat = {key: record[key] for key in (_CHAT, _TOOLS) if record.get(key)}
            yield Document(own, json.dumps(chat), is_chat=True)


def _read_text(path: Path) -> str:
    """Return the file's exact text, or an empty string if the file is not text."""
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return ""
    return "" if "\0" in text else text


def _read_jsonl(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield line numbers and records, skipping empty lines."""
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
        known = record if isinstance(record, dict) else {}
        if isinstance(known.get(_TEXT), str):
            # JSON may hold half a surrogate pair.
            yield number, {_TEXT: known[_TEXT].encode(errors="replace").decode()}
        elif _is_chat(known):
            yield number, known
        else:
            found = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise ConfigError(
                f'--data {path}, line {number}: expected an object with the field "{_TEXT}", a '
                f'string, or "{_CHAT}", objects with "role" and "content"; found '
                f"{found or 'nothing'}"
            )


def _is_chat(record: Mapping[str, Any]) -> bool:
    messages = record.get(_CHAT)
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages)
    )


def _read_parquet(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield row numbers and records; a null becomes an empty text, or is left out of a chat."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigError(
            f"--data {path} needs pyarrow: pip install -e '.[parquet]' in a clone of fullshard"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            names = schema.names
            if _TEXT in names:
                kind = schema.field(_TEXT).type
                if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
                    raise ConfigError(
                        f'--data {path}: column "{_TEXT}" holds {kind}, expected string'
                    )
                texts = file.read(columns=[_TEXT]).column(_TEXT).to_pylist()
                yield from ((number, {_TEXT: text or ""}) for number, text in enumerate(texts))
                return
            if _CHAT not in names:
                raise ConfigError(
                    f'--data {path}: expected a column "{_TEXT}" or "{_CHAT}", found '
                    f"{', '.join(names)}"
                )
            chats = file.read(columns=[name for name in (_CHAT, _TOOLS) if name in names])
    except (OSError, arrow.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--data {path}: cannot be read as parquet ({reason})") from error
    for number, record in enumerate(chats.to_pylist()):
        known = _without_nulls(record)
        if not _is_chat(known):
            raise ConfigError(
                f'--data {path}, row {number}: expected "{_CHAT}" to be objects with "role" and '
                '"content"'
            )
        yield number, known


def _without_nulls(value: Any) -> Any:
    """Return JSON values without fields that are null: parquet gives all rows the same fields."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _folders(path: Path, root: Path) -> set[str]:
    return set(path.relative_to(root).parts[:-1])


def _is_visible(path: Path, root: Path) -> bool:
    return path.is_file() and not any(p.startswith(".") for p in path.relative_to(root).parts)
