"""Real text as tokens, in an order that depends only on the step number.

    documents --byte-level BPE--> tokens --Order--> windows of a step

Documents are sorted, held-out documents are chosen by a hash of their names, and tokens are cached
under a hash of everything that they depend on, so every worker and every restart reads the same
arrays. The tokenizer is trained on the text, or is that of the model whose weights the run begins
with.
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

from fullshard.errors import ConfigError

from .documents import HELD_OUT_OF_256, Document, collect

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]  # 1D
Indices = npt.NDArray[np.int64]

END = "<|end|>"  # end mark between documents; its id is 0
LEAST_TOKENS = 257  # one per byte value, and END
MOST_TOKENS = 1 << 15  # only unusually large texts fill more; ids are uint16
_FORMAT = 3  # part of the cache key: raise it whenever the content of the cache changes
_AT_ONCE = 1024  # documents encoded together: few, as ids in Python lists are large


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """The tokenized text of a run; equal keys mean equal tokens.

    Attributes:
        end: id of the mark between documents.
        held_out_nbytes: size of the held-out text, in bytes.
    """

    train: Tokens
    held_out: Tokens
    tokenizer: Tokenizer
    key: str
    num_documents: int
    nbytes: int
    end: int
    held_out_nbytes: int

    def bytes_per_token(self) -> npt.NDArray[np.float64]:
        """Return the number of text bytes of each token id (0 for ``END``), ``[vocab]``.

        For a tokenizer that was not trained here it is the mean over the held-out text.
        """
        vocabulary = self.tokenizer.get_vocab()
        counts = np.zeros(max(vocabulary.values()) + 1)
        if vocabulary.get(END) != self.end:
            counts[:] = self.held_out_nbytes / len(self.held_out)
            return counts
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


def load_text(
    data: str | None, *, vocab_size: int, pretrained: Path | None = None
) -> TokenizedText:
    """Collect the text and tokenize it, or read its tokens from the cache.

    Args:
        data: see ``collect``.
        vocab_size: of the model.
        pretrained: a folder with the tokenizer to use; None: train one.

    Raises:
        ConfigError: see ``collect``; or the tokenizer is missing, or does not fit the model.
    """
    documents = collect(data)
    given = None if pretrained is None else _read_tokenizer(pretrained, vocab_size)
    key = _key(documents, vocab_size, given)
    folder = _cache_root() / key
    if not folder.exists():
        _fill_cache(folder, documents, vocab_size, given)
    facts = json.loads((folder / "facts.json").read_text())
    return TokenizedText(
        end=facts["end"],
        held_out_nbytes=facts["held_out_nbytes"],
        train=np.load(folder / "train.npy", mmap_mode="r"),
        held_out=np.load(folder / "held_out.npy", mmap_mode="r"),
        tokenizer=Tokenizer.from_file(str(folder / "tokenizer.json")),
        key=key,
        num_documents=len(documents),
        nbytes=sum(len(document.text.encode()) for document in documents),
    )


def _read_tokenizer(folder: Path, vocab_size: int) -> tuple[Tokenizer, int]:
    """Return the tokenizer in ``folder``, and the id that ends its texts."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ConfigError(f"--init {folder}: there is no tokenizer.json, which the text needs")
    try:
        tokenizer = Tokenizer.from_file(str(path))
        config = folder / "tokenizer_config.json"
        end = json.loads(config.read_text()).get("eos_token") if config.exists() else None
        end = end["content"] if isinstance(end, dict) else end
    except Exception as error:  # tokenizers raises plain ones
        raise ConfigError(f"--init {folder}: its tokenizer cannot be read ({error})") from error
    number = None if end is None else tokenizer.token_to_id(end)
    if number is None:
        raise ConfigError(
            f"--init {folder}: tokenizer_config.json names no eos_token that the tokenizer knows; "
            "it separates documents"
        )
    size = max(tokenizer.get_vocab().values()) + 1
    if size > vocab_size:
        raise ConfigError(f"--init {folder}: {size} tokens, but the model has {vocab_size} rows")
    return tokenizer, number


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


def _fill_cache(
    folder: Path,
    documents: Sequence[Document],
    vocab_size: int,
    given: tuple[Tokenizer, int] | None,
) -> None:
    """Write the tokens beside ``folder``, then rename: ``folder`` is complete or absent."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
    try:
        train, held_out = split(documents)
        if given is None:
            tokenizer = train_tokenizer(train, vocab_size)
            end = tokenizer.get_vocab()[END]
        else:
            tokenizer, end = given
        np.save(unfinished / "train.npy", _encode(tokenizer, end, train))
        np.save(unfinished / "held_out.npy", _encode(tokenizer, end, held_out))
        tokenizer.save(str(unfinished / "tokenizer.json"))
        facts = {"end": end, "held_out_nbytes": sum(len(text.encode()) for text in held_out)}
        (unfinished / "facts.json").write_text(json.dumps(facts))
        unfinished.rename(folder)
    except OSError:
        if not folder.exists():  # otherwise another process was faster, with the same tokens
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _encode(tokenizer: Tokenizer, end: int, texts: Sequence[str]) -> Tokens:
    is_small = max(tokenizer.get_vocab().values()) < 1 << 16
    pieces = [
        np.array([end, *encoding.ids], dtype=np.uint16 if is_small else np.uint32)
        for start in range(0, len(texts), _AT_ONCE)
        for encoding in tokenizer.encode_batch(
            list(texts[start : start + _AT_ONCE]), add_special_tokens=False
        )
    ]
    return np.concatenate(pieces)


def _key(
    documents: Sequence[Document], vocab_size: int, given: tuple[Tokenizer, int] | None
) -> str:
    digest = hashlib.sha256(json.dumps([_FORMAT, vocab_size]).encode())
    if given is not None:
        tokenizer, end = given
        digest.update(json.dumps([end, tokenizer.to_str()]).encode())
    for document in documents:
        for part in (document.name.encode(), document.text.encode()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def _cache_root() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "fullshard" / "tokens"
