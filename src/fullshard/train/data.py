"""Real text as tokens, in an order that depends only on the step number.

    documents --byte-level BPE--> tokens (uint16) --Order--> windows of a step

Documents are sorted, held-out documents are chosen by a hash of their names, and tokens are cached
under a hash of everything that they depend on, so every worker and every restart reads the same
arrays.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .documents import HELD_OUT_OF_256, Document, collect

Tokens = npt.NDArray[np.uint16]  # 1D
Indices = npt.NDArray[np.int64]

END = "<|end|>"  # end mark between documents; its id is 0
LEAST_TOKENS = 257  # one per byte value, and END
MOST_TOKENS = 1 << 15  # only unusually large texts fill more; ids are uint16
_FORMAT = 2  # part of the cache key: raise it whenever the content of the cache changes
_AT_ONCE = 1024  # documents encoded together: few, as ids in Python lists are large


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """The tokenized text of a run; equal keys mean equal tokens."""

    train: Tokens
    held_out: Tokens
    tokenizer: Tokenizer
    key: str
    num_documents: int
    nbytes: int

    def bytes_per_token(self) -> Indices:
        """Return the number of text bytes of each token id (0 for ``END``), ``[vocab]``."""
        vocabulary = self.tokenizer.get_vocab()
        counts = np.zeros(max(vocabulary.values()) + 1, dtype=np.int64)
        for token, index in vocabulary.items():
            counts[index] = 0 if token == END else len(token)  # one character per byte
        return counts


@dataclass(frozen=True, slots=True)
class Order:
    """The assignment of text windows to workers and steps.

    An epoch is a permutation drawn from ``seed`` and the epoch's number; a step may read across the
    end of an epoch. There is no state between steps, so a resumed run needs only the step number.
    """

    num_windows: int
    seed: int
    batch: int
    accumulate: int
    num_workers: int

    def windows(self, *, step: int, microbatch: int, rank: int) -> Indices:
        """Return indices of the ``batch`` windows that ``rank`` reads; ``step`` counts from 1."""
        row = (step - 1) * self.accumulate + microbatch
        first = (row * self.num_workers + rank) * self.batch
        places = range(first, first + self.batch)
        epochs = (divmod(place, self.num_windows) for place in places)
        return np.array([_permutation(self.num_windows, self.seed, e)[i] for e, i in epochs])


def num_windows(tokens: Tokens, seq: int) -> int:
    """Return the number of windows of ``seq`` inputs, each followed by a token as target."""
    return max(0, (len(tokens) - 1) // seq)


def read_windows(tokens: Tokens, indices: Indices, seq: int) -> Indices:
    """Return the windows' tokens, ``[len(indices), seq + 1]``: inputs and one more for targets."""
    starts = indices[:, None] * seq
    windows: Indices = tokens[starts + np.arange(seq + 1)].astype(np.int64)
    return windows


def load_text(data: str | None, *, vocab_size: int) -> TokenizedText:
    """Collect the text and tokenize it, or read its tokens from the cache.

    Raises:
        ConfigError: see ``collect``.
    """
    documents = collect(data)
    key = _key(documents, vocab_size)
    folder = _cache_root() / key
    if not folder.exists():
        _fill_cache(folder, documents, vocab_size)
    return TokenizedText(
        train=np.load(folder / "train.npy", mmap_mode="r"),
        held_out=np.load(folder / "held_out.npy", mmap_mode="r"),
        tokenizer=Tokenizer.from_file(str(folder / "tokenizer.json")),
        key=key,
        num_documents=len(documents),
        nbytes=sum(len(document.text.encode()) for document in documents),
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


def split(documents: Sequence[Document]) -> tuple[list[str], list[str]]:
    """Return the texts to train on and the held-out texts.

    If choosing by name holds out much more or less than a sixteenth, as with few documents or one
    large document, the last sixteenth of every document is held out instead.
    """
    train = [document.text for document in documents if not document.is_held_out]
    held_out = [document.text for document in documents if document.is_held_out]
    share = sum(map(len, held_out)) / sum(len(document.text) for document in documents)
    if 1 / 64 < share < 1 / 4:
        return train, held_out
    cuts = [len(document.text) * (256 - HELD_OUT_OF_256) // 256 for document in documents]
    pairs = list(zip(documents, cuts, strict=True))
    return [d.text[:cut] for d, cut in pairs], [d.text[cut:] for d, cut in pairs]


@functools.lru_cache(maxsize=2)
def _permutation(num_windows: int, seed: int, epoch: int) -> Indices:
    return np.random.default_rng((seed, epoch)).permutation(num_windows)


def _fill_cache(folder: Path, documents: Sequence[Document], vocab_size: int) -> None:
    """Write the tokens beside ``folder``, then rename: ``folder`` is complete or absent."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
    try:
        train, held_out = split(documents)
        tokenizer = train_tokenizer(train, vocab_size)
        np.save(unfinished / "train.npy", _encode(tokenizer, train))
        np.save(unfinished / "held_out.npy", _encode(tokenizer, held_out))
        tokenizer.save(str(unfinished / "tokenizer.json"))
        unfinished.rename(folder)
    except OSError:
        if not folder.exists():  # otherwise another process was faster, with the same tokens
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> Tokens:
    end = tokenizer.token_to_id(END)
    pieces = [
        np.array([end, *encoding.ids], dtype=np.uint16)
        for start in range(0, len(texts), _AT_ONCE)
        for encoding in tokenizer.encode_batch(list(texts[start : start + _AT_ONCE]))
    ]
    return np.concatenate(pieces)


def _key(documents: Sequence[Document], vocab_size: int) -> str:
    digest = hashlib.sha256(json.dumps([_FORMAT, vocab_size]).encode())
    for document in documents:
        for part in (document.name.encode(), document.text.encode()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def _cache_root() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "fullshard" / "tokens"
