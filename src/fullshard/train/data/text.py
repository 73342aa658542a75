"""Real text as tokens, in an order that depends only on the step number.

Documents become tokens by a byte-level BPE, and tokens become rows of a step by ``RowOrder``.

Documents are sorted, and a hash of their names chooses the held-out documents. Tokens are cached
under a hash of everything that they depend on, so every worker and every restart reads the same
arrays. The tokenizer is trained on the text, or belongs to the weights with which the run begins.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from torch import Tensor

from fullshard.errors import ConfigError
from fullshard.train.config import TrainConfig
from fullshard.train.data.documents import BadRecords, Document, collect, find
from fullshard.train.data.rows import Indices, Packed, Rows, Tokens, Windows
from fullshard.train.data.tokenizer import PretrainedTokenizer
from fullshard.train.data.tokenizing import END, fill_cache
from fullshard.train.files import appear

LEAST_TOKENS = 257  # one per byte value, and END
MOST_TOKENS = 1 << 15  # only unusually large texts fill more; ids are uint16
_FORMAT = 8  # part of the cache key: raise it whenever the content of the cache changes
_PART = 1 << 20  # rows that are shuffled together
_UNSURE_NS = 2_000_000_000  # a file changed more recently may change again unnoticed


@dataclass(frozen=True, slots=True)
class TextPart:
    """The tokens of the text to train on, or of the held-out text.

    Attributes:
        tokens: tokens of all documents, one after the other.
        end: id of the mark before every text and after the last sample of a row.
        starts: start of each sample of chats in ``tokens``, and the end; None for texts.
        learned: for each of ``tokens``, whether it is to be learned; None for texts: all are.
        nbytes: size of the learned text in bytes.
        alone: whether a row has only one sample, see ``Packed``.
    """

    tokens: Tokens
    end: int
    starts: Indices | None
    learned: npt.NDArray[np.bool_] | None
    nbytes: int
    alone: bool = False

    def rows(self, seq: int) -> Rows:
        """Return the text in rows of ``seq`` tokens."""
        if self.starts is None or self.learned is None:
            return Windows(self.tokens, seq)
        return Packed(self.tokens, self.starts, self.learned, seq, self.end, self.alone)


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """The tokenized text of a run; equal keys mean equal tokens.

    Attributes:
        end: id of the mark between documents.
        left_out: visible files that were not read, each with the reason.
        bad: records that were left out.
    """

    train: TextPart
    held_out: TextPart
    tokenizer: Tokenizer
    key: str
    num_documents: int
    nbytes: int
    end: int
    left_out: tuple[str, ...] = ()
    bad: BadRecords = field(default_factory=BadRecords)

    def question(self) -> list[int]:
        """Return the tokens of the first held-out chat up to its first answer; [] for texts."""
        tokens, learned = self.held_out.tokens, self.held_out.learned
        return [] if learned is None else tokens[: int(np.argmax(learned))].tolist()

    def bytes_per_token(self) -> npt.NDArray[np.float64]:
        """Return the number of text bytes of each token id (0 for ``END``), ``[vocab]``.

        For a pretrained tokenizer, all ids get the mean over the learned tokens of the held-out
        text.
        """
        vocabulary = self.tokenizer.get_vocab()
        counts = np.zeros(max(vocabulary.values()) + 1)
        is_ours = vocabulary.get(END) == self.end == 0  # so in each tokenizer that was trained here
        if not is_ours:
            held_out = self.held_out
            learned = len(held_out.tokens) if held_out.learned is None else held_out.learned.sum()
            counts[:] = held_out.nbytes / max(1, learned)
            return counts
        for token, index in vocabulary.items():
            counts[index] = 0 if token == END else len(token)  # one character per byte
        return counts


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The assignment of rows of the text to workers and steps.

    An epoch is a permutation drawn from ``seed`` and the epoch's number; a step may read across the
    end of an epoch. There is no state between steps, so a resumed run needs only the step number.

    Large texts are read in parts of at most ``_PART`` rows. If there are n parts, each is every nth
    row of the text, shuffled. So memory and time do not grow with the text.
    """

    num_rows: int
    seed: int
    batch: int
    accumulate: int
    num_workers: int

    def rows(self, *, step: int, microbatch: int, rank: int) -> Indices:
        """Return indices of the ``batch`` rows that ``rank`` reads; ``step`` counts from 1."""
        first = (self._first(step) + microbatch * self.num_workers + rank) * self.batch
        return self._at(first, self.batch)

    def rows_of_step(self, step: int) -> Indices:
        """Return indices of all rows that the workers read in ``step``."""
        count = self.accumulate * self.num_workers * self.batch
        return self._at(self._first(step) * self.batch, count)

    def _first(self, step: int) -> int:
        return (step - 1) * self.accumulate * self.num_workers

    def _at(self, first: int, count: int) -> Indices:
        epochs = (divmod(place, self.num_rows) for place in range(first, first + count))
        return np.array([self._row(epoch, place) for epoch, place in epochs])

    def _row(self, epoch: int, place: int) -> int:
        num_parts = -(-self.num_rows // _PART)
        size, longer = divmod(self.num_rows, num_parts)  # the first parts have one row more
        part, place = divmod(place, size + 1)
        if part >= longer:
            part, place = divmod((part - longer) * (size + 1) + place, size)
            part += longer
        shuffled = _shuffled(size + (part < longer), self.seed, epoch, part)
        return part + num_parts * int(shuffled[place])


@dataclass(frozen=True, slots=True)
class Feed:
    """The rows to train on, in their order."""

    rows: Rows
    order: RowOrder

    @classmethod
    def of(cls, config: TrainConfig, text: TokenizedText, num_workers: int) -> Feed:
        """Create for a run of ``num_workers``."""
        rows = text.train.rows(config.seq)
        order = RowOrder(len(rows), config.seed, config.batch, config.accumulate, num_workers)
        return cls(rows, order)

    def read(self, *, step: int, rank: int) -> list[Tensor]:
        """Return the tensors that ``rank`` reads in ``step``, one microbatch after the other."""
        order = self.order
        rows = [order.rows(step=step, microbatch=n, rank=rank) for n in range(order.accumulate)]
        return self.rows.read(np.concatenate(rows)).tensors()

    def num_learned(self, step: int) -> int:
        """Return the number of labels that all workers learn in ``step``."""
        return self.rows.num_learned(self.order.rows_of_step(step))


def load_text(
    data: str | None,
    *,
    vocab_size: int,
    pretrained: Path | None = None,
    skip_bad: bool = False,
) -> TokenizedText:
    """Collect the text and tokenize it, or read its tokens from the cache.

    Args:
        data: see ``collect``.
        vocab_size: vocabulary size of the model.
        pretrained: a folder with the tokenizer to use; None: train one.
        skip_bad: whether to leave out bad records: those of ``collect``, and chats without an
            answer to learn.

    Raises:
        ConfigError: see ``collect``; or there are bad records, or the tokenizer is missing, does
            not fit the model, or cannot write chats.
    """
    given = None
    if pretrained is not None:
        given = PretrainedTokenizer(pretrained)
        given.check_size(vocab_size)
    try:
        told = _known(data, vocab_size, given, skip_bad=skip_bad)
    except OSError as error:
        raise ConfigError(
            f"{error}: --data must be readable, and {_cache_root()} writable for its tokens "
            "(XDG_CACHE_HOME names another place)"
        ) from error
    folder = _cache_root() / told["key"]
    facts = json.loads((folder / "facts.json").read_text())
    bad = BadRecords(**told["bad"]).joined(BadRecords(**facts["bad"]))
    if not skip_bad:
        bad.refuse()
    return TokenizedText(
        train=_read_part(folder, "train", facts),
        held_out=_read_part(folder, "held_out", facts),
        tokenizer=Tokenizer.from_file(str(folder / "tokenizer.json")),
        key=facts["key"],
        num_documents=told["num_documents"],
        left_out=tuple(told["left_out"]),
        nbytes=told["nbytes"],
        end=facts["end"],
        bad=bad,
    )


def _known(
    data: str | None, vocab_size: int, given: PretrainedTokenizer | None, *, skip_bad: bool
) -> dict[str, Any]:
    """Return the facts of the text, and ensure that its tokens are in the cache.

    One process of a machine reads and tokenizes the text, if the file system has locks. The other
    processes wait, and find the facts by sizes and times of the files, as every later start does.
    """
    of_model = hashlib.sha256(json.dumps([_FORMAT, vocab_size]).encode())
    if given is not None:
        of_model.update(given.identity(of_chats=True).encode())
    seen, _ = _seen(data, of_model.hexdigest())
    with _alone(seen):
        with suppress(OSError, ValueError, KeyError):
            told: dict[str, Any] = json.loads(seen.read_text())
            if (_cache_root() / told["key"]).exists():
                return told
        collected = collect(data, skip_bad=skip_bad)
        documents = collected.documents
        if given is None and documents[0].is_chat:
            raise ConfigError(
                f"--data {data}: holds chats, which need a tokenizer with a chat template: give "
                "--init"
            )
        told = {
            "key": _key(documents, vocab_size, given),
            "num_documents": len(documents),
            "nbytes": sum(len(document.text.encode()) for document in documents),
            "left_out": collected.left_out,
            "bad": asdict(collected.bad),
        }
        folder = _cache_root() / told["key"]
        with _alone(folder):  # another process may have the same text in other files
            if not folder.exists():
                fill_cache(folder, documents, vocab_size, given)
        again, newest_ns = _seen(data, of_model.hexdigest())
        if again == seen and time.time_ns() - newest_ns >= _UNSURE_NS:
            appear(seen, lambda to: to.write_text(json.dumps(told)))
        return told


def _seen(data: str | None, of_model: str) -> tuple[Path, int]:
    """Return the path of the text's facts, and the time of the latest change, in nanoseconds.

    Names, sizes and times of all files of the text give the path.
    """
    root, files = find(data)
    digest = hashlib.sha256(f"{of_model} {root.absolute()}".encode())
    newest_ns = 0
    for path in sorted(files):
        facts = path.stat()
        times = facts.st_mtime_ns, facts.st_ctime_ns
        newest_ns = max(newest_ns, *times)
        digest.update(repr((str(path), facts.st_size, *times, facts.st_ino)).encode())
    return _cache_root() / "seen" / f"{digest.hexdigest()[:32]}.json", newest_ns


@functools.lru_cache(maxsize=2)
def _shuffled(size: int, seed: int, epoch: int, part: int) -> Indices:
    seeds = (seed, epoch, part) if part else (seed, epoch)
    return np.random.default_rng(seeds).permutation(size)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock file of ``folder``; wait without a time limit for a process that holds it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("a") as file:
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read_part(folder: Path, name: str, facts: dict[str, Any]) -> TextPart:
    def read(file: str) -> Any:
        path = folder / f"{file}.npy"
        return np.load(path, mmap_mode="r") if path.exists() else None

    tokens, starts, learned = read(name), read(f"{name}_starts"), read(f"{name}_learned")
    return TextPart(tokens, facts["end"], starts, learned, facts[f"{name}_nbytes"])


def _key(documents: Sequence[Document], vocab_size: int, given: PretrainedTokenizer | None) -> str:
    """Return a digest of everything that decides the tokens, except a date in a template."""
    is_chat = documents[0].is_chat
    version = importlib.metadata.version("tokenizers")
    digest = hashlib.sha256(json.dumps([_FORMAT, version, vocab_size, is_chat]).encode())
    if given is not None:
        digest.update(given.identity(of_chats=is_chat).encode())
    for document in documents:
        for part in (document.name.encode(), document.text.encode()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def _cache_root() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "fullshard" / "tokens"
