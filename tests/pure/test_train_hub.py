"""Folders of a hub and tables are read as by the ``datasets`` library."""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from fullshard.errors import ConfigError
from fullshard.train.data.documents import collect

datasets: Any = pytest.importorskip("datasets", reason="the extra datasets is not installed")

TRAIN = ["one", "two, and\nmore", 'three "3"']
TEST = ["four", "five"]
PER_FILE = "- config_name: {0}\n  data_files:\n  - split: {1}\n    path: {2}\n"


@pytest.fixture(autouse=True)
def own_cache_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def lines(texts: Iterable[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def rows(texts: Iterable[str], path: Path, sep: str = ",") -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=sep).writerows([["text"], *([text] for text in texts)])


def table(texts: Iterable[str], path: Path) -> None:
    datasets.Dataset.from_dict({"text": list(texts)}).to_parquet(str(path))


def write(root: Path, files: dict[str, object]) -> None:
    """Write lists of texts in the format of each file name, and strings as plain text."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content)
        elif path.suffix == ".parquet":
            table(content, path)  # type: ignore[arg-type]
        elif path.suffix in (".csv", ".tsv"):
            rows(content, path, "," if path.suffix == ".csv" else "\t")  # type: ignore[arg-type]
        elif path.suffix == ".gz":
            path.write_bytes(gzip.compress(lines(content).encode()))  # type: ignore[arg-type]
        else:
            path.write_text(lines(content))  # type: ignore[arg-type]


README = "---\nlicense: mit\nconfigs:\n{}---\n# A dataset\n"
FOLDERS: dict[str, dict[str, object]] = {
    "shards": {
        "data/train-00000-of-00002.parquet": TRAIN[:1],
        "data/train-00001-of-00002.parquet": TRAIN[1:],
        "data/test-00000-of-00001.parquet": TEST,
    },
    "names": {"train.jsonl": TRAIN, "test.jsonl": TEST, "validation.jsonl": TEST},
    "longer_names": {"training.jsonl": TRAIN, "testing.jsonl": TEST, "evaluation.jsonl": TEST},
    "folders": {"train/a.jsonl": TRAIN, "test/a.jsonl": TEST},
    "inside_of_names": {"my_train_file.jsonl": TRAIN, "my_test_file.jsonl": TEST},
    "no_split": {"a.jsonl": TRAIN, "b.jsonl": TEST},
    "only_test": {"test.jsonl": TEST},
    "files_in_the_readme": {
        "a.jsonl": TRAIN,
        "b.jsonl": TEST,
        "README.md": README.format(
            PER_FILE.format("default", "train", "a.jsonl") + "  - split: test\n    path: b.jsonl\n"
        ),
    },
    "a_default_configuration": {
        "en/a.jsonl": TRAIN,
        "de/a.jsonl": TEST,
        "README.md": README.format(
            "- config_name: en\n  data_files: en/*.jsonl\n  default: true\n"
            "- config_name: de\n  data_files: de/*.jsonl\n"
        ),
    },
    "more_splits": {
        "a.jsonl": TRAIN,
        "b.jsonl": TEST,
        "README.md": README.format(
            PER_FILE.format("default", "unsupervised", "b.jsonl")
            + "  - split: train\n    path: a.jsonl\n"
        ),
    },
    "a_readme_without_files": {"a.jsonl": TRAIN, "README.md": "---\nlicense: mit\n---\nconfigs:\n"},
    "csv": {"train.csv": TRAIN, "test.csv": TEST, "README.md": "# A dataset\n"},
    "tsv": {"train.tsv": [TRAIN[0], TRAIN[2]]},
    "compressed": {"train.jsonl.gz": TRAIN},
    "lines_in_json": {"train.json": TRAIN, "test.json": TEST},
    "ndjson": {"train.ndjson": TRAIN},
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_gives_the_records_that_the_library_gives(tmp_path: Path, name: str) -> None:
    root = tmp_path / "data"
    write(root, FOLDERS[name])
    found = datasets.load_dataset(str(root), cache_dir=str(tmp_path / "cache"))
    split = found["train"] if "train" in found else found["test"]
    assert [one.text for one in collect(str(root)).documents] == list(split["text"])


def test_another_programs_state_is_no_dataset(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": TRAIN, "state.json": '{"step": 3}'})
    assert [one.text for one in collect(str(tmp_path)).documents] == TRAIN


@pytest.mark.parametrize("splits", [False, True])
def test_what_the_library_saved_is_read(tmp_path: Path, splits: bool) -> None:
    train, test = (datasets.Dataset.from_dict({"text": texts}) for texts in (TRAIN, TEST))
    saved = datasets.DatasetDict(train=train, test=test) if splits else train
    saved.save_to_disk(str(tmp_path / "saved"))
    found = collect(str(tmp_path / "saved"))
    assert [one.text for one in found.documents] == TRAIN
    assert found.left_out == (("split test",) if splits else ())


@pytest.mark.parametrize("kind", [".parquet", ".csv", ".tsv", ".arrow"])
def test_a_table_is_read_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"rows{kind}"
    if kind == ".arrow":
        datasets.Dataset.from_dict({"text": TRAIN}).save_to_disk(str(tmp_path / "saved"))
        next((tmp_path / "saved").glob("*.arrow")).rename(path)
    else:
        write(tmp_path, {path.name: TRAIN})
    documents = collect(str(path)).documents
    assert [one.text for one in documents] == TRAIN
    assert documents[1].name == f"{path.name}:000000001"


def test_texts_of_a_table_stay_texts(tmp_path: Path) -> None:
    texts = ["NA", "1", "null", "1.50"]
    write(tmp_path, {"a.csv": texts})
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    assert [one.text for one in collect(str(tmp_path)).documents] == texts * 2


@pytest.mark.parametrize("name", ["a[1].csv", "a*.csv", "b[c]/a.parquet"])
def test_a_name_is_no_pattern(tmp_path: Path, name: str) -> None:
    write(tmp_path, {name: TRAIN, "a1.csv": TEST})
    assert [one.text for one in collect(str(tmp_path / name)).documents] == TRAIN


def test_a_folder_with_the_name_of_a_reader_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "csv", FOLDERS["files_in_the_readme"])
    write(tmp_path, {"other.csv": TEST})
    monkeypatch.chdir(tmp_path)
    assert [one.text for one in collect("csv").documents] == TRAIN
    assert collect("csv").left_out == ("split test",)


def test_the_library_sends_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr("socket.getaddrinfo", lambda *place, **options: asked.append(place))
    write(tmp_path, {"a.csv": TRAIN})
    assert len(collect(str(tmp_path)).documents) == len(TRAIN) and asked == []


def test_fields_that_other_rows_have_are_left_out_of_chats_and_texts(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    chats = [[{"role": "user", "content": "a"}, call], [{"role": "user", "content": "b"}]]
    records = [{"messages": chat} for chat in chats]
    datasets.Dataset.from_list(records).to_parquet(str(tmp_path / "a.parquet"))
    read = [json.loads(one.text)["messages"] for one in collect(str(tmp_path)).documents]
    del call["content"]
    assert read == chats
    table(["a", None], tmp_path / "a.parquet")  # type: ignore[list-item]
    assert [one.text for one in collect(str(tmp_path)).documents] == ["a"]


def with_both_columns(root: Path) -> None:
    both = {"text": ["a"], "messages": [[{"role": "user", "content": "b"}]]}
    datasets.Dataset.from_dict(both).to_parquet(str(root / "a.parquet"))


def without_a_default(root: Path) -> None:
    two = PER_FILE.format("en", "train", "a.jsonl") + PER_FILE.format("de", "train", "b.jsonl")
    write(root, {"a.jsonl": TRAIN, "b.jsonl": TEST, "README.md": README.format(two)})


def without_train(root: Path) -> None:
    two = PER_FILE.format("default", "train_sft", "a.jsonl")
    two += "  - split: train_gen\n    path: b.jsonl\n"
    write(root, {"a.jsonl": TRAIN, "b.jsonl": TEST, "README.md": README.format(two)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda root: datasets.Dataset.from_dict({"body": ["a"]}).to_parquet(
                str(root / "a.parquet")
            ),
            "a.parquet: has none of the columns text, messages, tools; found body",
        ),
        (
            lambda root: datasets.Dataset.from_dict({"text": [1]}).to_parquet(
                str(root / "a.parquet")
            ),
            r"a.parquet, row 0: expected .*; found text \(int\)",
        ),
        (with_both_columns, 'a.parquet, row 0: has both "text" and "messages"'),
        (lambda root: (root / "a.parquet").write_text("no parquet"), "a.parquet: cannot be read"),
        (lambda root: (root / "a.csv").write_text("a,b\n1,2\n"), "a.csv.*: .* found a, b"),
        (without_a_default, r"cannot be read by the datasets library.*\['en', 'de'\]"),
        (without_train, "has the splits train_sft, train_gen and none named train"),
    ],
)
def test_what_has_no_text_is_refused(
    tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    make(tmp_path)
    with pytest.raises(ConfigError, match=message):
        collect(str(tmp_path))


@pytest.mark.parametrize("files", [{"a.csv": TRAIN}, FOLDERS["files_in_the_readme"]])
def test_without_the_library_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, object]
) -> None:
    write(tmp_path, files)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"needs datasets: pip install -e '.\[datasets\]'"):
        collect(str(tmp_path))


def test_a_table_is_a_text_only_among_texts_alone(tmp_path: Path) -> None:
    write(tmp_path, {"a.csv": TRAIN, "main.py": "print()\n"})
    first, second = (one.text for one in collect(str(tmp_path)).documents)
    assert first.startswith("text") and second == "print()\n"
    write(tmp_path, {"b.jsonl": TEST})
    assert [one.text for one in collect(str(tmp_path)).documents] == [*TRAIN, *TEST, second]


def test_lines_in_json_may_begin_with_a_bad_record(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"text": 3}\n' + lines(TRAIN))
    with pytest.raises(ConfigError, match=r"a.json, line 1: expected .*; found text \(int\)"):
        collect(str(path))
    assert [one.text for one in collect(str(path), skip_bad=True).documents] == TRAIN


def test_texts_with_splits_in_all_names_are_read_like_records(tmp_path: Path) -> None:
    names = ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens")
    write(tmp_path, {**dict.fromkeys(names, "text\n"), "README.md": "about\n"})
    (tmp_path / "logo.png").write_bytes(b"\xff\xfe")
    found = collect(str(tmp_path))
    assert [one.name for one in found.documents] == ["wiki.train.tokens"]
    assert found.left_out == (
        "logo.png (not UTF-8)",
        "wiki.test.tokens (split test)",
        "wiki.valid.tokens (split valid)",
        "README.md (about the data)",
    )
    write(tmp_path, {"more.py": "print()\n"})  # now one name has no split
    assert len(collect(str(tmp_path)).documents) == 5
