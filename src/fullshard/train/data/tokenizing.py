"""Tokens of documents, in files of the cache; finished groups survive a killed process."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fullshard.errors import ConfigError
from fullshard.progress import Operation
from fullshard.train.data.chats import ChatTokenizer, Sample
from fullshard.train.data.documents import BadRecords, Document, size_of, split
from fullshard.train.data.tokenizer import PretrainedTokenizer
from fullshard.train.files import appear
from fullshard.train.showing import showing_progress

END = "<|end|>"  # end mark between documents; its id is 0
_AT_ONCE = 1024  # documents encoded together; few, because ids in Python lists take much memory

Arrays = dict[str, npt.NDArray[Any]]


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


def fill_cache(
    folder: Path,
    documents: Sequence[Document],
    vocab_size: int,
    given: PretrainedTokenizer | None,
) -> None:
    """Write the tokens beside ``folder``, then rename: ``folder`` is complete or absent.

    Groups of documents are written one by one. After a killed process, the next call continues
    with the first group without a file.
    """
    unfinished = folder.with_suffix(".unfinished")
    groups = unfinished / "groups"
    train, held_out = split(documents)
    try:
        groups.mkdir(parents=True, exist_ok=True)
        tokenizer, end = _tokenizer(unfinished, train, vocab_size, given)
        if given is not None and documents[0].is_chat:
            make = partial(_of_chats, ChatTokenizer(given), _dtype_of(tokenizer))
        else:
            make = partial(_of_texts, tokenizer, end, _dtype_of(tokenizer))
        facts: dict[str, Any] = {"end": end}
        bad = BadRecords()
        with showing_progress():
            work = Operation("tokenizing", size_of(documents), "characters")
            for name, part in (("train", train), ("held_out", held_out)):
                files = [*_groups(groups / name, part, make, work)]
                facts[f"{name}_nbytes"] = sum(int(one) for one in _read(files, "nbytes"))
                for one in _read(files, "bad"):
                    bad = bad.joined(BadRecords(**json.loads(str(one))))
                _write(unfinished, name, files)
        facts["bad"] = asdict(bad)
        facts["key"] = _digest([end, tokenizer.to_str()], unfinished)
        tokenizer.save(str(unfinished / "tokenizer.json"))
        (unfinished / "facts.json").write_text(json.dumps(facts))
        shutil.rmtree(groups)
        unfinished.rename(folder)
    except OSError:
        if not folder.exists():  # else another process has written the same tokens
            shutil.rmtree(unfinished, ignore_errors=True)  # the disk may be full
            raise


def _tokenizer(
    folder: Path, train: Sequence[Document], vocab_size: int, given: PretrainedTokenizer | None
) -> tuple[Tokenizer, int]:
    """Return the tokenizer and its end mark; store a trained tokenizer in ``folder``."""
    if given is not None:
        return given.plain, given.end
    kept = folder / "groups" / "tokenizer.json"
    if kept.exists():
        tokenizer = Tokenizer.from_file(str(kept))
    else:
        tokenizer = train_tokenizer([document.text for document in train], vocab_size)
        appear(kept, lambda path: tokenizer.save(str(path)))
    return tokenizer, tokenizer.get_vocab()[END]


def _groups(
    start: Path,
    documents: Sequence[Document],
    make: Callable[[Sequence[Document]], Arrays],
    work: Operation,
) -> Iterator[Path]:
    """Yield the files of groups of documents, new or written by an earlier process."""
    for number, first in enumerate(range(0, len(documents), _AT_ONCE)):
        group = documents[first : first + _AT_ONCE]
        path = start.with_name(f"{start.name}-{number:06d}.npz")
        if not path.exists():
            arrays = make(group)
            appear(path, lambda to, arrays=arrays: np.savez(to, **arrays))  # type: ignore[misc]
        yield path
        work.add(size_of(group))


def _read(files: Sequence[Path], key: str) -> Iterator[npt.NDArray[Any]]:
    """Yield one array of each group, without holding the others."""
    for path in files:
        with np.load(path) as found:
            yield found[key]


def _of_texts(
    tokenizer: Tokenizer, end: int, kind: npt.DTypeLike, group: Sequence[Document]
) -> Arrays:
    texts = [document.text for document in group]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    ids = [np.array([end, *one.ids], kind) for one in encoded]
    nbytes = sum(len(text.encode()) for text in texts)
    return {"tokens": np.concatenate(ids), **_beside(nbytes, BadRecords())}


def _of_chats(tokenizer: ChatTokenizer, kind: npt.DTypeLike, group: Sequence[Document]) -> Arrays:
    samples: list[Sample] = []
    bad = BadRecords()
    for document in group:
        try:
            samples += tokenizer.samples(document)
        except ConfigError as error:
            bad.add(error)
    return {
        "tokens": np.array([token for one in samples for token in one.tokens], kind),
        "learned": np.array([own for one in samples for own in one.learned], np.bool_),
        "lengths": np.array([len(one.tokens) for one in samples], np.int64),
        **_beside(sum(one.nbytes for one in samples), bad),
    }


def _beside(nbytes: int, bad: BadRecords) -> Arrays:
    """Return the size of the learned text in bytes, and bad records, as arrays."""
    return {"nbytes": np.array(nbytes), "bad": np.array(json.dumps(asdict(bad)))}


def _write(folder: Path, name: str, files: Sequence[Path]) -> None:
    """Write the arrays of all groups: tokens, and for chats also learned marks and starts."""
    with np.load(files[0]) as first:
        is_chat = "learned" in first
    _join(folder / f"{name}.npy", files, "tokens")
    if is_chat:
        _join(folder / f"{name}_learned.npy", files, "learned")
        lengths = np.concatenate([*_read(files, "lengths")])
        np.save(folder / f"{name}_starts.npy", np.cumsum([0, *lengths], dtype=np.int64))


def _join(path: Path, files: Sequence[Path], key: str) -> None:
    """Write one array of all groups, end to end, without holding it in memory."""
    kind = np.lib.format.dtype_to_descr(next(_read(files, key)).dtype)
    size = sum(len(one) for one in _read(files, key))
    header = {"descr": kind, "fortran_order": False, "shape": (size,)}
    with path.open("wb") as file:  # not a memory map, in which a full disk kills the process
        np.lib.format.write_array_header_1_0(file, header)
        for one in _read(files, key):
            file.write(one.tobytes())


def _digest(facts: Any, folder: Path) -> str:
    """Return a digest of ``facts`` and of all tokens in ``folder``."""
    digest = hashlib.sha256(json.dumps(facts).encode())
    for path in sorted(folder.glob("*.npy")):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def _dtype_of(tokenizer: Tokenizer) -> type[np.uint16] | type[np.uint32]:
    return np.uint16 if max(tokenizer.get_vocab().values()) < 1 << 16 else np.uint32
