"""Real text as tokens, in an order that depends only on the step number.

    documents --byte-level BPE--> tokens --Order--> rows of a step

Documents are sorted, held-out documents are chosen by a hash of their names, and tokens are cached
under a hash of everything that they depend on, so every worker and every restart reads the same
arrays. The tokenizer is trained on the text, or is that of the model whose weights the run begins
with.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from fullshard.errors import ConfigError

from .chats import ChatTokenizer, Sample
from .config import TrainConfig
from .documents import BadRecords, Document, collect, split
from .pretrained import PretrainedTokenizer
from .rows import Indices, Packed, Rows, Tokens, Windows

END = "<|end|>"  # end mark between documents; its id is 0
LEAST_TOKENS = 257  # one per byte value, and END
MOST_TOKENS = 1 << 15  # only unusually large texts fill more; ids are uint16
_FORMAT = 6  # part of the cache key: raise it whenever the content of the cache changes
_TELL_S = 5.0  # seconds between two lines about progress
_AT_ONCE = 1024  # documents encoded together: few, as ids in Python lists are large


@dataclass(frozen=True, slots=True)
class TextPart:
    """The tokens of the text to train on, or of the held-out text.

    Attributes:
        tokens: of all documents, one after the other.
        end: id of the mark before every text and behind the last sample of a row.
        starts: where each sample of a chat begins in ``tokens``, and the end; None for texts.
        learned: for each of ``tokens``, whether it is to be learned; None for texts, where all are.
        nbytes: size of what is to be learned, in bytes.
    """

    tokens: Tokens
    end: int
    starts: Indices | None
    learned: npt.NDArray[np.bool_] | None
    nbytes: int

    def rows(self, seq: int) -> Rows:
        """Return the text in rows of ``seq`` tokens."""
        if self.starts is None or self.learned is None:
            return Windows(self.tokens, seq)
        return Packed(self.tokens, self.starts, self.learned, seq, self.end)


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
        """Return the tokens of the first held-out chat up to its first answer; [] of texts."""
        tokens, learned = self.held_out.tokens, self.held_out.learned
        return [] if learned is None else tokens[: int(np.argmax(learned))].tolist()

    def bytes_per_token(self) -> npt.NDArray[np.float64]:
        """Return the number of text bytes of each token id (0 for ``END``), ``[vocab]``.

        For a tokenizer that was not trained here it is the mean over what is learned of the
        held-out text.
        """
        vocabulary = self.tokenizer.get_vocab()
        counts = np.zeros(max(vocabulary.values()) + 1)
        if vocabulary.get(END) != self.end:
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
        return np.array([_permutation(self.num_rows, self.seed, e)[i] for e, i in epochs])


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
        """Return what ``rank`` reads in ``step``, one microbatch after the other."""
        order = self.order
        rows = [
            order.rows(step=step, microbatch=microbatch, rank=rank)
            for microbatch in range(order.accumulate)
        ]
        return self.rows.read(np.concatenate(rows)).tensors()

    def num_learned(self, step: int) -> int:
        """Return how many labels all workers learn in ``step``."""
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
        vocab_size: of the model.
        pretrained: a folder with the tokenizer to use; None: train one.
        skip_bad: whether to leave out bad records, of ``collect`` and chats without an answer that
            can be learned.

    Raises:
        ConfigError: see ``collect``; or there are bad records, or the tokenizer is missing, does
            not fit the model, or cannot write chats.
    """
    collected = collect(data, skip_bad=skip_bad)
    documents = collected.documents
    if pretrained is None and documents[0].is_chat:
        raise ConfigError(
            f"--data {data}: holds chats, which need a tokenizer with a chat template: give --init"
        )
    given = None
    if pretrained is not None:
        given = PretrainedTokenizer(pretrained)
        given.check_size(vocab_size)
    folder = _cache_root() / _key(documents, vocab_size, given)
    if not folder.exists():
        with _alone(folder):  # one process of a machine tokenizes, if its files have locks
            if not folder.exists():
                _fill_cache(folder, documents, vocab_size, given)
    facts = json.loads((folder / "facts.json").read_text())
    bad = BadRecords(**facts["bad"])
    if not skip_bad:
        bad.refuse()
    return TokenizedText(
        train=_read_part(folder, "train", facts),
        held_out=_read_part(folder, "held_out", facts),
        tokenizer=Tokenizer.from_file(str(folder / "tokenizer.json")),
        key=facts["key"],
        num_documents=len(documents),
        left_out=collected.left_out,
        nbytes=sum(len(document.text.encode()) for document in documents),
        end=facts["end"],
        bad=collected.bad.joined(bad),
    )


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a lossless byte-level BPE; small texts give fewer tokens than ``vocab_size``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@functools.lru_cache(maxsize=2)
def _permutation(num_rows: int, seed: int, epoch: int) -> Indices:
    return np.random.default_rng((seed, epoch)).permutation(num_rows)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock file of ``folder``; wait without a time limit for a process that holds it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("a") as file:
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _with_progress(documents: Sequence[Document], at_once: int) -> Iterator[Sequence[Document]]:
    """Yield groups of ``at_once`` documents, and print the progress every few seconds."""
    began_s = told_s = time.monotonic()
    size = sum(len(document.text) for document in documents)
    done = 0
    for start in range(0, len(documents), at_once):
        group = documents[start : start + at_once]
        yield group
        done += sum(len(document.text) for document in group)
        now_s = time.monotonic()
        if now_s - told_s >= _TELL_S:
            told_s = now_s
            left_s = (now_s - began_s) * (size - done) / max(1, done)
            print(
                f"tokenizing: {done / 1e6:,.0f} of {size / 1e6:,.0f} million characters, "
                f"{left_s:.0f} s left",
                file=sys.stderr,
            )


def _fill_cache(
    folder: Path,
    documents: Sequence[Document],
    vocab_size: int,
    given: PretrainedTokenizer | None,
) -> None:
    """Write the tokens beside ``folder``, then rename: ``folder`` is complete or absent."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
    try:
        train, held_out = split(documents)
        if given is None:
            tokenizer = train_tokenizer([document.text for document in train], vocab_size)
            end = tokenizer.get_vocab()[END]
        else:
            tokenizer, end = given.plain, given.end
        facts: dict[str, Any] = {"end": end}
        bad = BadRecords()
        for name, part in (("train", train), ("held_out", held_out)):
            if given is not None and documents[0].is_chat:
                nbytes = _write_chats(unfinished, name, given, part, bad)
            else:
                np.save(unfinished / f"{name}.npy", _encode(tokenizer, end, part))
                nbytes = sum(len(document.text.encode()) for document in part)
            facts[f"{name}_nbytes"] = nbytes
        facts["bad"] = asdict(bad)
        facts["key"] = _digest([end, tokenizer.to_str()], unfinished)
        tokenizer.save(str(unfinished / "tokenizer.json"))
        (unfinished / "facts.json").write_text(json.dumps(facts))
        unfinished.rename(folder)
    except OSError:
        if not folder.exists():  # otherwise another process was faster, with the same tokens
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _digest(facts: Any, folder: Path) -> str:
    """Return a digest of ``facts`` and of all tokens in ``folder``."""
    digest = hashlib.sha256(json.dumps(facts).encode())
    for path in sorted(folder.glob("*.npy")):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def _read_part(folder: Path, name: str, facts: dict[str, Any]) -> TextPart:
    def read(file: str) -> Any:
        path = folder / f"{file}.npy"
        return np.load(path, mmap_mode="r") if path.exists() else None

    tokens, starts, learned = read(name), read(f"{name}_starts"), read(f"{name}_learned")
    return TextPart(tokens, facts["end"], starts, learned, facts[f"{name}_nbytes"])


def _write_chats(
    folder: Path,
    name: str,
    given: PretrainedTokenizer,
    documents: Sequence[Document],
    bad: BadRecords,
) -> int:
    """Write the samples of chats, and return the size of what is to be learned in bytes."""
    tokenizer = ChatTokenizer(given)
    samples: list[Sample] = []
    for (document,) in _with_progress(documents, 1):
        try:
            samples += tokenizer.samples(document)
        except ConfigError as error:
            bad.add(error)
    kind = _dtype_of(given.plain)
    tokens = [np.array(sample.tokens, kind) for sample in samples]
    learned = [np.array(sample.learned, np.bool_) for sample in samples]
    lengths = [len(sample.tokens) for sample in samples]
    np.save(folder / f"{name}.npy", np.concatenate([np.empty(0, kind), *tokens]))
    np.save(folder / f"{name}_learned.npy", np.concatenate([np.empty(0, np.bool_), *learned]))
    np.save(folder / f"{name}_starts.npy", np.cumsum([0, *lengths], dtype=np.int64))
    return sum(sample.nbytes for sample in samples)


def _encode(tokenizer: Tokenizer, end: int, documents: Sequence[Document]) -> Tokens:
    pieces = [
        np.array([end, *encoding.ids], dtype=_dtype_of(tokenizer))
        for group in _with_progress(documents, _AT_ONCE)
        for encoding in tokenizer.encode_batch(
            [document.text for document in group], add_special_tokens=False
        )
    ]
    return np.concatenate(pieces)


def _dtype_of(tokenizer: Tokenizer) -> type[np.uint16] | type[np.uint32]:
    return np.uint16 if max(tokenizer.get_vocab().values()) < 1 << 16 else np.uint32


def _key(documents: Sequence[Document], vocab_size: int, given: PretrainedTokenizer | None) -> str:
    """Return a digest of everything that decides the tokens, but for the date of a template."""
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
