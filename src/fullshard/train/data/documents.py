"""Read ``--data`` (texts, JSON, tables, folders of a hub, compressed or not) into documents."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import re
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from fullshard.errors import ConfigError
from fullshard.train.config import LOCK
from fullshard.train.data.hub import COLUMNS, TABLES, Rows, describes_itself, splits_in, table_in


def read_bytes(path: Path) -> bytes:
    """Return the contents of a file, decompressed.

    Raises:
        ConfigError: the file cannot be read, or needs a package that is not installed.
    """
    decompress = _DECOMPRESS.get(path.suffix.lower(), bytes)
    try:
        return decompress(path.read_bytes())
    except ImportError as error:
        raise ConfigError(
            f"--data {path} needs zstandard: pip install -e '.[zstd]' in a clone of fullshard, or "
            "Python 3.14"
        ) from error
    except Exception as error:  # each module raises its own class
        raise ConfigError(f"--data {path}: cannot be read ({error})") from error


def _zstd(data: bytes) -> bytes:
    """Decompress all frames by Python's own module, from 3.14 on, or by ``zstandard``."""
    try:
        from compression import zstd
    except ImportError:
        import zstandard

        with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as stream:
            found: bytes = stream.read()
        return found
    decompressed: bytes = zstd.decompress(data)
    return decompressed


_DECOMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress,
    ".bz2": bz2.decompress,
    ".xz": lzma.decompress,
    ".zst": _zstd,
}


_SKIPPED = frozenset(  # folders
    ["test", "tests", "encodings", "idlelib", "pydoc_data", "site-packages", "dist-packages"]
)
HELD_OUT_OF_256 = 16  # one document in sixteen
# Fields of a record, columns of a table.
_TEXT, _CHAT, _TOOLS = COLUMNS
_BOTH = f'--data {{}}: has both "{_TEXT}" and "{_CHAT}"; leave out the one not to be learned'
_NUM_TOLD = 3  # number of bad records that messages name
_ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar")  # of files, not one compressed file


@dataclass(frozen=True, slots=True)
class Document:
    """A text or a chat.

    Attributes:
        name: path of the file, relative to the given folder, and the number of a record.
        text: the text, or the messages and tools of a chat as JSON.
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


@dataclass
class BadRecords:
    """Records from which no document or sample can be made.

    Attributes:
        count: their number.
        first: place and reason of the first of them.
    """

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, error: ConfigError) -> None:
        """Count a record."""
        self.count += 1
        if self.count <= _NUM_TOLD:
            self.first.append(str(error))

    def joined(self, other: BadRecords) -> BadRecords:
        """Return the records of both."""
        return BadRecords(self.count + other.count, [*self.first, *other.first][:_NUM_TOLD])

    def __str__(self) -> str:
        more = self.count - len(self.first)
        return "; ".join([*self.first, *([f"and {more:,} more"] if more else [])])

    def refuse(self) -> None:
        """Raise ``ConfigError`` if there are any."""
        if self.count == 1:
            raise ConfigError(f"{self}; --skip-bad leaves this record out")
        if self.count:
            raise ConfigError(
                f"{self.count:,} bad records, which --skip-bad leaves out, such as {self}"
            )


class Corpus(NamedTuple):
    """The documents of a file or folder.

    Attributes:
        documents: sorted by name; only texts, or only chats.
        left_out: visible files that were not read, by extension and reason.
        bad: records that were left out.
    """

    documents: list[Document]
    left_out: tuple[str, ...]
    bad: BadRecords


def collect(data: str | None, *, skip_bad: bool = False) -> Corpus:
    """Return the texts to train on.

    Each record gives a document: the field or column ``text``, or a chat in ``messages``, with
    optional ``tools``. Records are in ``*.jsonl``, ``*.ndjson``, ``*.parquet``, and in ``*.json``
    with an array, one record or one per line. ``*.csv``, ``*.tsv`` and ``*.arrow`` have records if
    they are given alone, or in a folder with other records or with tables alone. Any other file of
    UTF-8 is one text. Files may be compressed (``*.gz``, ``*.bz2``, ``*.xz``, ``*.zst``). Hidden
    files in a folder are never read.

    In a folder with records, as on the Hugging Face Hub, README, LICENSE and similar files are left
    out. If names of files or folders give splits and one is ``train``, the other splits are left
    out. In a folder of texts, that holds only if each name gives a split.

    The ``datasets`` library reads tables, and folders that name their data: by ``configs`` in
    README.md, or written by ``Dataset.save_to_disk``. Of these the split ``train`` is read.

    Args:
        data: a file or a folder. ``None`` reads the ``*.py`` of Python's standard library, without
            tests and tables.
        skip_bad: whether to leave out bad records: records that are not JSON in UTF-8, or have
            both ``text`` and ``messages``, or neither.

    Raises:
        ConfigError: the path is missing or holds no text, a file cannot be read, there are bad
            records, or the documents mix texts and chats.
    """
    root, files = find(data)
    bad = BadRecords()
    if root.is_dir() and describes_itself(root):
        documents, told = _of_splits(root, bad)
    else:
        documents, told = _of_files(root, files, bad)
    if not skip_bad:
        bad.refuse()
    if not documents:
        more = f"; left out: {', '.join(told)}" if told else ""
        more += f"; bad records: {bad}" if bad.count else ""
        raise ConfigError(
            f"--data {data or root}: holds no text (UTF-8 files that are not empty){more}"
        )
    chats = [document for document in documents if document.is_chat]
    if chats and len(chats) < len(documents):
        text = next(document for document in documents if not document.is_chat)
        raise ConfigError(
            f"--data {data or root}: {chats[0].name} is a chat and {text.name} is a text; give "
            "only chats or only texts"
        )
    return Corpus(sorted(documents, key=lambda document: document.name), told, bad)


def _of_splits(root: Path, bad: BadRecords) -> tuple[list[Document], tuple[str, ...]]:
    """Return the documents of a folder that names its data, and the splits that were not read."""
    splits = splits_in(root)
    if "train" not in splits and len(splits) > 1:
        raise ConfigError(
            f"--data {root}: has the splits {', '.join(splits)} and none named train; give the "
            "files of one"
        )
    split = "train" if "train" in splits else next(iter(splits))
    records = _read_rows(splits[split], f"{root}, {split}")
    others = tuple(f"split {name}" for name in splits if name != split)
    return [one for one in _documents(records, split, bad) if one.text], others


def _of_files(
    root: Path, files: Sequence[Path], bad: BadRecords
) -> tuple[list[Document], tuple[str, ...]]:
    """Return the documents of files in ``root``, and the files that were left out."""
    folder = root.parent if root.is_file() else root
    names = {path: _name(path.relative_to(folder)) for path in sorted(files)}
    about = {p: "about the data" for p in names if root.is_dir() and _ABOUT.match(p.name)}
    records = {path: its for path in names if (its := _records(path)) is not None}
    tables = [path for path in names if _kind(path) in TABLES and path not in records]
    if root.is_file() or records or names.keys() == {*tables, *about}:
        records |= {path: _rows_of(path) for path in tables}
    left_out: dict[Path, str] = {}
    if records:
        left_out |= about | _other_splits({path: names[path] for path in records})
    read: dict[Path, list[Document]] = {}
    for path, name in names.items():
        if path in records and path not in left_out:
            read[path] = list(_documents(records[path], name, bad))
        elif path not in left_out:
            read[path] = _text(path, name, left_out)
    texts = {path: names[path] for path, found in read.items() if found and path not in about}
    if root.is_dir() and all(map(_split_of, texts.values())) and (others := _other_splits(texts)):
        left_out |= others | about
    told = _told({names[path]: why for path, why in left_out.items()})
    kept = [one for path, found in read.items() if path not in left_out for one in found]
    return [one for one in kept if one.text], told


def _other_splits(names: Mapping[Path, str]) -> dict[Path, str]:
    """Return the files of other splits, with their split, if there is a split to train on."""
    splits = {path: _split_of(name) for path, name in names.items()}
    others = {path: f"split {own}" for path, own in splits.items() if own not in ("", "train")}
    return others if "train" in splits.values() else {}


def find(data: str | None) -> tuple[Path, list[Path]]:
    """Return the file or folder of ``data``, see ``collect``, and its visible files.

    Files of runs are left out: by default a run writes below the current folder.

    Raises:
        ConfigError: there is no such file or folder, or it is the folder of a run.
    """
    if data is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [p for p in root.rglob("*.py") if not _SKIPPED & {*p.relative_to(root).parts}]
    else:
        root = Path(data)
        if not os.path.exists(root):  # False, too, if access is denied
            raise ConfigError(f"--data {data}: there is no such file or folder")
        files = [root] if root.is_file() else [p for p in root.rglob("*") if _is_visible(p, root)]
        runs = {path.parent for path in files if path.name == LOCK}
        if root in runs:
            raise ConfigError(
                f"--data {data}: is the folder of a run, as it has {LOCK}; give another folder, or "
                "remove this file"
            )
        if runs:
            files = [path for path in files if runs.isdisjoint(path.parents)]
    return root, files


def _name(path: Path) -> str:
    """Return a path as text, escaping bytes that are not UTF-8."""
    return os.fsencode(path.as_posix()).decode(errors="backslashreplace")


def _told(left_out: Mapping[str, str]) -> tuple[str, ...]:
    """Return one text for each extension and reason of files that were left out."""
    kinds: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, why in left_out.items():
        kinds[Path(name).suffix, why].append(name)
    return tuple(
        f"{first} and {len(others):,} more {f'*{kind}' if kind else 'without extension'} ({why})"
        if others
        else f"{first} ({why})"
        for (kind, why), (first, *others) in kinds.items()
    )


def split(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Return the documents to train on and those held out.

    Names decide which documents are held out. With few documents, or one large document, this may
    hold out much more or less than a sixteenth. Then the last sixteenth of every text is held out
    instead, or the sixteenth of the chats with the smallest hashes.
    """
    train = [document for document in documents if not document.is_held_out]
    held_out = [document for document in documents if document.is_held_out]
    share = size_of(held_out) / size_of(documents)
    if 1 / 64 < share < 1 / 4:
        return train, held_out
    if documents[0].is_chat:
        if len(documents) == 1:
            raise ConfigError(
                "--data holds one chat; one is held out for evaluation, so give at least two"
            )
        by_hash = sorted(documents, key=lambda document: document.digest)
        number = max(1, len(documents) * HELD_OUT_OF_256 // 256)
        chosen = {document.name for document in by_hash[:number]}
        train = [document for document in documents if document.name not in chosen]
        return train, by_hash[:number]
    cuts = [len(document.text) * (256 - HELD_OUT_OF_256) // 256 for document in documents]
    pairs = list(zip(documents, cuts, strict=True))
    train = [replace(document, text=document.text[:cut]) for document, cut in pairs]
    return train, [replace(document, text=document.text[cut:]) for document, cut in pairs]


def size_of(documents: Sequence[Document]) -> int:
    """Return the number of characters of documents."""
    return sum(len(document.text) for document in documents)


Records = Iterator[tuple[int, Mapping[str, Any] | ConfigError]]
"""Numbers of records in their file, each with the record, or the error of a bad record."""

_ABOUT = re.compile(r"README|LICENSE|dataset_infos?\.json$|dataset_dict\.json$|state\.json$")
_SPLIT = re.compile(
    r"(?:^|[-._/ 0-9])(train(?:ing)?|test(?:ing)?|validation|valid|val|dev|eval(?:uation)?)"
    r"(?=$|[-._/ 0-9])"
)


def _split_of(name: str) -> str:
    """Return the split in the name of a file of records, such as "train"; "" if it has none."""
    found = _SPLIT.search(name)
    return "" if found is None else found[1].replace("training", "train")


def _records(path: Path) -> Records | None:
    """Return the records of a file; None if it has none, or is a table that may be a text."""
    kind = _kind(path)
    if kind in (".jsonl", ".ndjson"):
        return _read_jsonl(path)
    if kind == ".json":
        return _read_json(path)
    return _rows_of(path) if kind == ".parquet" else None


def _rows_of(path: Path) -> Records:
    return _read_rows(table_in(path, _kind(path)), str(path))


def _kind(path: Path) -> str:
    """Return the extension of a file without that of its compression."""
    name = Path(path.name.lower())
    return name.with_suffix("").suffix if name.suffix in _DECOMPRESS else name.suffix


def _documents(records: Records, name: str, bad: BadRecords) -> Iterator[Document]:
    for number, record in records:
        if isinstance(record, ConfigError):
            bad.add(record)
            continue
        own = f"{name}:{number:09d}"  # names sort in file order
        if _CHAT not in record:
            yield Document(own, record[_TEXT])
        else:
            chat = {key: record[key] for key in (_CHAT, _TOOLS) if record.get(key)}
            yield Document(own, json.dumps(chat), is_chat=True)


def _text(path: Path, name: str, left_out: dict[Path, str]) -> list[Document]:
    """Return the file as one document; if it is not text, add it to ``left_out``."""
    if path.suffix.lower() in _ARCHIVES:
        left_out[path] = "an archive: unpack it"
        return []
    try:
        text = read_bytes(path).decode()
    except UnicodeDecodeError:
        left_out[path] = "not UTF-8"
        return []
    if "\0" in text:
        left_out[path] = "not text"
        return []
    return [Document(name, text)]


def _read_jsonl(path: Path) -> Records:
    """Yield line numbers and records, skipping empty lines."""
    # Not splitlines: JSON may hold U+2028. No byte of a longer character is a line break.
    for number, line in enumerate(read_bytes(path).split(b"\n"), start=1):
        if line.strip():
            yield number, _parsed(line, f"{path}, line {number}")


def _parsed(line: bytes, where: str) -> Mapping[str, Any] | ConfigError:
    try:
        return _record(json.loads(line.decode()), where)
    except UnicodeDecodeError as error:
        return ConfigError(f"--data {where}: cannot be read as UTF-8 ({error})")
    except (ValueError, RecursionError) as error:
        return ConfigError(f"--data {where}: not JSON ({error})")


def _read_json(path: Path) -> Records | None:
    """Return the records of an array or of lines, or a single one; None if there are none."""
    try:
        found = json.loads(read_bytes(path))
    except (ValueError, RecursionError):
        lines = list(_read_jsonl(path))
        has_records = any(not isinstance(line, ConfigError) for _, line in lines)
        return iter(lines) if has_records else None
    records = found if isinstance(found, list) else [found]
    if not any(isinstance(one, dict) and {_TEXT, _CHAT} & one.keys() for one in records):
        return None
    return (
        (number, _record(one, f"{path}, record {number}"))
        for number, one in enumerate(records, start=1)
    )


def _record(record: Any, where: str) -> Mapping[str, Any] | ConfigError:
    """Return a record with a text or a chat, or an error if the record has both or neither."""
    known = record if isinstance(record, dict) else {}
    is_text = isinstance(known.get(_TEXT), str)
    if is_text and _CHAT in known:
        return ConfigError(_BOTH.format(where))
    if is_text:  # JSON may hold half a surrogate pair
        return {_TEXT: known[_TEXT].encode(errors="replace").decode()}
    messages = known[_CHAT] if isinstance(known.get(_CHAT), list) else []
    if messages and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        return known
    kinds = {key: f" ({type(known[key]).__name__})" for key in (_TEXT, _CHAT) if key in known}
    names = ", ".join(key + kinds.get(key, "") for key in known)
    found = names if isinstance(record, dict) else type(record).__name__
    return ConfigError(
        f'--data {where}: expected an object with the field "{_TEXT}", a string, or "{_CHAT}", '
        f'objects with "role" and "content"; found {found or "nothing"}'
    )


def _read_rows(rows: Rows, where: str) -> Records:
    """Yield row numbers and records; a null text becomes empty, other null fields vanish."""
    for number, row in rows:
        known = _without_nulls(row)
        if row.get(_TEXT, "") is None and _CHAT not in known:
            known = {_TEXT: ""}
        yield number, _record(known, f"{where}, row {number}")


def _without_nulls(value: Any) -> Any:
    """Return JSON values without null fields, because tables give all rows the same fields."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _is_visible(path: Path, root: Path) -> bool:
    return path.is_file() and not any(p.startswith(".") for p in path.relative_to(root).parts)
