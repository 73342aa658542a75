"""The trainer's text: what is collected, how it is tokenized, and in which order it is read."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fullshard.train import data, worker
from fullshard.train.config import TrainConfig
from fullshard.train.data import (
    END,
    RowOrder,
    load_text,
    train_tokenizer,
)
from fullshard.train.documents import Document, split
from fullshard.train.rows import Windows

TEXT = "def add(left, right):\n    return left + right  # naïve, 中文 and 🙂\n\n"


def write_files(root: Path, num_files: int = 30) -> Path:
    for number in range(num_files):
        path = root / f"part{number % 3}" / f"file{number:02d}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TEXT * 20 + f"x{number} = {number}\n", encoding="utf-8")
    return root


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_files_are_held_out_by_name_alone() -> None:
    chosen = [Document(f"file{n}.py", "a").is_held_out for n in range(2000)]
    assert chosen == [Document(f"file{n}.py", "b").is_held_out for n in range(2000)]
    assert 90 < sum(chosen) < 160  # one in sixteen of 2000 is 125


def test_the_end_of_a_single_file_is_held_out() -> None:
    train, held_out = split([Document("a", "x" * 1600)])
    assert [document.text for document in train] == ["x" * 1500]
    assert [document.text for document in held_out] == ["x" * 100]


def test_where_names_choose_too_little_the_end_of_each_document_is_held_out() -> None:
    small = next(n for n in range(1000) if Document(f"{n}", "").is_held_out)
    documents = [Document(f"{small}", "y" * 16), Document("a", "x" * 160_000)]
    assert not documents[1].is_held_out
    train, held_out = split(documents)
    assert [document.text for document in train] == ["y" * 15, "x" * 150_000]
    assert [document.text for document in held_out] == ["y", "x" * 10_000]


def test_tokens_give_back_every_text_exactly() -> None:
    tokenizer = train_tokenizer([TEXT * 10], 400)
    for text in (TEXT, "\r\n\t tabs and \x01 control", "ünseen 字 🙃", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id(END) == 0
    assert len(tokenizer.encode(TEXT).ids) < len(TEXT.encode()) / 2


def test_the_same_text_gives_the_same_tokens_from_anywhere_and_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_text(str(write_files(tmp_path / "a")), vocab_size=400)
    cached = load_text(str(tmp_path / "a"), vocab_size=400)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    again = load_text(str(write_files(tmp_path / "b")), vocab_size=400)
    for other in (cached, again):
        assert other.key == first.key
        assert np.array_equal(other.train.tokens, first.train.tokens)
        assert np.array_equal(other.held_out.tokens, first.held_out.tokens)
    write_files(tmp_path / "b", 31)
    assert load_text(str(tmp_path / "b"), vocab_size=400).key != first.key


def test_bytes_per_token_add_up_to_the_text(tmp_path: Path) -> None:
    text = load_text(str(write_files(tmp_path / "a")), vocab_size=400)
    counts = text.bytes_per_token()
    parts = (text.train, text.held_out)
    assert sum(counts[part.tokens].sum() for part in parts) == text.nbytes
    assert [counts[part.tokens].sum() for part in parts] == [part.nbytes for part in parts]


def test_windows_overlap_by_the_one_token_that_is_only_a_target() -> None:
    tokens = np.arange(11, dtype=np.uint16)
    windows = Windows(tokens, 5)
    assert len(windows) == 2
    batch = windows.read(np.array([1, 0]))
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9], [0, 1, 2, 3, 4]]
    assert batch.labels.tolist() == [[6, 7, 8, 9, 10], [1, 2, 3, 4, 5]]
    assert batch.positions is None and windows.num_learned(np.array([1, 0])) == 10
    assert len(Windows(tokens[:5], 5)) == 0


def test_the_order_reads_every_window_once_an_epoch() -> None:
    order = RowOrder(num_rows=24, seed=3, batch=2, accumulate=3, num_workers=2)
    per_epoch = [
        order.rows(step=step, microbatch=microbatch, rank=rank)
        for step in range(1, 5)
        for microbatch in range(3)
        for rank in range(2)
    ]
    first, second = np.concatenate(per_epoch[:12]), np.concatenate(per_epoch[12:])
    assert sorted(first) == sorted(second) == list(range(24))
    assert first.tolist() != second.tolist()
    steps = [order.rows_of_step(step).tolist() for step in range(1, 5)]
    assert [row for step in steps for row in step] == [*first, *second]


def test_the_order_needs_the_step_alone_and_depends_on_the_seed() -> None:
    def order(seed: int) -> RowOrder:
        return RowOrder(num_rows=1000, seed=seed, batch=4, accumulate=1, num_workers=2)

    late = order(0).rows(step=170, microbatch=0, rank=1)
    walked = [order(0).rows(step=step, microbatch=0, rank=1) for step in range(1, 171)]
    assert walked[-1].tolist() == late.tolist()
    assert order(1).rows(step=170, microbatch=0, rank=1).tolist() != late.tolist()


def test_more_workers_with_smaller_batches_read_the_same_step() -> None:
    def step(batch: int, num_workers: int) -> list[int]:
        order = RowOrder(100, 0, batch=batch, accumulate=1, num_workers=num_workers)
        ranks = range(num_workers)
        return [i for r in ranks for i in order.rows(step=9, microbatch=0, rank=r).tolist()]

    assert step(8, 1) == step(4, 2) == step(2, 4)


def test_one_of_several_processes_makes_the_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, made = str(write_files(tmp_path / "a")), []
    fill = data._fill_cache

    def slowly(*args: Any) -> None:
        made.append(args)
        time.sleep(0.2)
        fill(*args)

    monkeypatch.setattr(data, "_fill_cache", slowly)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: load_text(root, vocab_size=400).key, range(4)))
    assert len(set(found)) == len(made) == 1


def test_tokenizing_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data, "_TELL_S", 0.0)
    load_text(str(write_files(tmp_path / "a")), vocab_size=400)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and all(line.startswith("tokenizing: 0 of 0 million") for line in told)


def test_the_text_is_loaded_before_workers_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collectives have a time-out, and tokenizing may take longer."""

    def join() -> None:
        raise InterruptedError

    monkeypatch.setattr(worker, "join_world", join)
    config = TrainConfig(data=str(write_files(tmp_path / "a")), out=str(tmp_path / "run"))
    with pytest.raises(InterruptedError):
        worker.run_worker(config, prepared=False)
    monkeypatch.setattr(data, "_fill_cache", None)
    assert load_text(config.data, vocab_size=2048).num_documents == 30
    with pytest.raises(InterruptedError):  # what fails is told later, on all workers
        worker.run_worker(replace(config, data="nowhere"), prepared=False)
