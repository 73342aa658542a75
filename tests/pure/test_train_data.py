"""The trainer's text: its collection, tokens and order."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fullshard.errors import ConfigError
from fullshard.train import showing
from fullshard.train.config import TrainConfig
from fullshard.train.data import documents, tokenizing
from fullshard.train.data import text as data
from fullshard.train.data.documents import Document, collect, split
from fullshard.train.data.rows import Windows
from fullshard.train.data.text import RowOrder, load_text
from fullshard.train.data.tokenizing import END, train_tokenizer
from fullshard.train.job import worker

TEXT = "def add(left, right):\n    return left + right  # naïve, 中文 and 🙂\n\n"


def write_files(root: Path, num_files: int = 30) -> Path:
    for number in range(num_files):
        path = root / f"part{number % 3}" / f"file{number:02d}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TEXT * 20 + f"x{number} = {number}\n", encoding="utf-8")
    return root


pytestmark = pytest.mark.usefixtures("own_cache")


def test_files_are_held_out_by_name_alone() -> None:
    chosen = [Document(f"file{n}.py", "a").is_held_out for n in range(2000)]
    assert chosen == [Document(f"file{n}.py", "b").is_held_out for n in range(2000)]
    assert 90 < sum(chosen) < 160  # 2000 / 16 is 125


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


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_files(tmp_path / "text")
    cache = tmp_path / "cache"
    cache.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    message = f"Not a directory.*{cache}/fullshard.* writable .*XDG_CACHE_HOME"
    with pytest.raises(ConfigError, match=message):
        load_text(str(root), vocab_size=400)


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


@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 23, 24, 25, 64])
def test_a_large_text_is_shuffled_in_parts(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_PART", 8)
    order = RowOrder(num_rows, seed=3, batch=1, accumulate=1, num_workers=1)
    rows = [int(order.rows(step=step, microbatch=0, rank=0)[0]) for step in range(1, num_rows + 1)]
    assert sorted(rows) == list(range(num_rows))
    num_parts = -(-num_rows // 8)
    parts = [row % num_parts for row in rows]
    assert parts == sorted(parts)
    assert max(parts.count(part) for part in set(parts)) <= 8


def test_the_order_of_a_small_text_is_one_permutation() -> None:
    order = RowOrder(100, seed=3, batch=100, accumulate=1, num_workers=1)
    whole = np.random.default_rng((3, 1)).permutation(100)
    assert order.rows(step=2, microbatch=0, rank=0).tolist() == whole.tolist()


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
    fill = data.fill_cache

    def slowly(*args: Any) -> None:
        made.append(args)
        time.sleep(0.2)
        fill(*args)

    monkeypatch.setattr(data, "fill_cache", slowly)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: load_text(root, vocab_size=400).key, range(4)))
    assert len(set(found)) == len(made) == 1


def make_older(root: Path, by_s: float = 3600.0) -> None:
    """Age the files: a recently changed file may change again with an equal time stamp."""
    for path in root.rglob("*"):
        os.utime(path, (time.time() - by_s,) * 2)


def test_files_are_read_once_a_machine_and_again_only_if_they_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, reads = write_files(tmp_path / "a"), []
    read = documents.read_bytes
    monkeypatch.setattr(data, "_UNSURE_NS", 0)
    monkeypatch.setattr(
        documents, "read_bytes", lambda path: (reads.append(path.name), read(path))[1]
    )

    def load(cores: int) -> tuple[str, int]:
        """Load with several workers at once; return the key and the number of files read."""
        reads.clear()
        with ThreadPoolExecutor(cores) as threads:
            found = list(threads.map(lambda _: load_text(str(root), vocab_size=400), range(cores)))
        assert len({(one.key, one.nbytes, one.num_documents) for one in found}) == 1
        assert found[0].nbytes == sum(path.stat().st_size for path in root.rglob("*.py"))
        return found[0].key, len(reads)

    first, count = load(4)
    assert count == 30
    assert load(4) == (first, 0)
    make_older(root)
    assert load(2) == (first, 30)  # equal tokens
    path = root / "part0" / "file00.py"
    times = path.stat()
    path.write_text(path.read_text().replace("add", "sum"))  # equal size
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    second, count = load(2)
    assert second != first and count == 30
    (root / "more.py").write_text("a")
    assert load(1)[1] == 31


def test_a_text_that_has_just_changed_is_read_again(tmp_path: Path) -> None:
    root = write_files(tmp_path / "a")
    load_text(str(root), vocab_size=400)
    assert [*(tmp_path / "cache").rglob("seen/*.json")] == []


KILLED = """
import os, signal, sys
from fullshard.train.data import text, tokenizing
tokenizing._AT_ONCE = 4
appear = tokenizing.appear
def killed(path, write):
    appear(path, write)
    if path.name == "train-000002.npz":
        os.kill(os.getpid(), signal.SIGKILL)
tokenizing.appear = killed
text.load_text(sys.argv[1], vocab_size=400)
"""


def test_what_was_tokenized_before_a_kill_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(write_files(tmp_path / "a"))
    killed = subprocess.run([sys.executable, "-c", KILLED, root], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    made, trained = [], []
    of_texts = tokenizing._of_texts

    def counted(*args: Any) -> Any:
        made.extend(args[-1])
        return of_texts(*args)

    monkeypatch.setattr(tokenizing, "_of_texts", counted)
    monkeypatch.setattr(tokenizing, "_AT_ONCE", 4)
    monkeypatch.setattr(tokenizing, "train_tokenizer", trained.append)
    text = load_text(root, vocab_size=400)
    assert len(made) == text.num_documents - 3 * 4 and trained == []
    assert [*(tmp_path / "cache").rglob("*.unfinished")] == []
    for part, its in zip((text.train, text.held_out), split(collect(root).documents), strict=True):
        expected = [id for one in its for id in (text.end, *text.tokenizer.encode(one.text).ids)]
        assert part.tokens.tolist() == expected


def test_tokens_of_all_groups_are_never_in_memory_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(group: list[Document]) -> tokenizing.Arrays:
        tokens = np.full(1 << 18, len(group[0].text), np.uint16)
        return {"tokens": tokens, **tokenizing._beside(0, documents.BadRecords())}

    monkeypatch.setattr(tokenizing, "_AT_ONCE", 1)
    monkeypatch.setattr(tokenizing, "_of_texts", lambda *args: make(args[-1]))
    texts = [Document(f"{number:02d}", "ab" * 300 * (number + 1)) for number in range(40)]
    tokenizing.train_tokenizer(["ab"], 300)
    tracemalloc.start()
    tokenizing.fill_cache(tmp_path / "cache", texts, 300, None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tokens = np.load(tmp_path / "cache" / "train.npy")
    held_out = np.load(tmp_path / "cache" / "held_out.npy")
    assert len(tokens) + len(held_out) == 40 << 18
    assert [*np.unique(np.diff(np.flatnonzero(np.diff(tokens))))] == [1 << 18]
    assert peak < 4 * (2 << 18)  # four of the forty groups


def test_tokenizing_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(showing, "_LINE_S", 0.0)
    load_text(str(write_files(tmp_path / "a")), vocab_size=400)
    first, *others = capsys.readouterr().err.splitlines()
    size = re.fullmatch(r"tokenizing: 0 of ([0-9,]+) characters", first)[1]
    line = rf"tokenizing: [0-9,]+ of {size} characters, [0-9,]+/s, \d+ s left"
    assert len(others) == 2 and all(re.fullmatch(line, one) for one in others)
    assert others[-1].startswith(f"tokenizing: {size} of ") and others[-1].endswith(" 0 s left")


def test_the_text_is_loaded_before_workers_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizing may take longer than the time-out of collectives."""

    def join() -> None:
        raise InterruptedError

    monkeypatch.setattr(worker, "join_world", join)
    config = TrainConfig(data=str(write_files(tmp_path / "a")), out=str(tmp_path / "run"))
    with pytest.raises(InterruptedError):
        worker.run_worker(config, prepared=False)
    monkeypatch.setattr(data, "fill_cache", None)
    assert load_text(config.data, vocab_size=2048).num_documents == 30
    with pytest.raises(InterruptedError):  # the error is reported later, on all workers
        worker.run_worker(replace(config, data="nowhere"), prepared=False)
