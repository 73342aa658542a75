"""Text, JSON and JSONL files and folders for ``--data``; test_train_hub.py tests tables."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import sys
from pathlib import Path

import pytest

from fullshard.errors import ConfigError
from fullshard.train.data.documents import Document, collect
from fullshard.train.run import RunDir

TEXT = "def add(left, right):\n    return left + right  # naïve, 中文 and 🙂\n"


def write_files(root: Path, num_files: int) -> Path:
    for number in range(num_files):
        path = root / f"part{number % 3}" / f"file{number:02d}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TEXT, encoding="utf-8")
    return root


def test_a_folder_is_read_sorted_and_without_what_is_no_text(tmp_path: Path) -> None:
    root = write_files(tmp_path / "text", 5)
    (root / "picture.bin").write_bytes(b"\xff\xfe\x00")
    (root / "zeros.txt").write_bytes(b"a\0b")
    (root / "empty.txt").touch()
    (root / ".hidden").write_text("hidden")
    names = [document.name for document in collect(str(root)).documents]
    assert names == sorted(names)
    assert set(names) == {f"part{n % 3}/file{n:02d}.py" for n in range(5)}
    assert collect(str(root)).left_out == ("picture.bin (not UTF-8)", "zeros.txt (not text)")


def test_files_of_runs_are_no_text(tmp_path: Path) -> None:
    """The default --out lies in the current folder, as the text may do."""
    root = write_files(tmp_path / "text", 5)
    before = collect(str(root))
    run = RunDir(root / "runs" / "default")
    (run.path / "earlier-1").mkdir(parents=True)
    run.lock.write_text("process 1")
    for path in (run.config, run.tokenizer, run.path / "earlier-1" / "plan.json"):
        path.write_text('{"text": "a record"}')
    assert collect(str(root)) == before


def test_the_folder_of_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fullshard.lock").touch()
    (tmp_path / "text.txt").write_text(TEXT)
    with pytest.raises(ConfigError, match="is the folder of a run"):
        collect(str(tmp_path))


@pytest.mark.parametrize("name", ["TEXT.JSONL", "TEXT.JSONL.GZ"])
def test_the_case_of_extensions_says_nothing(tmp_path: Path, name: str) -> None:
    record = json.dumps({"text": TEXT}).encode()
    (tmp_path / name).write_bytes(gzip.compress(record) if name.endswith("GZ") else record)
    assert [one.text for one in collect(str(tmp_path)).documents] == [TEXT]


def test_a_file_is_read_alone(tmp_path: Path) -> None:
    path = write_files(tmp_path, 2) / "part0" / "file00.py"
    assert collect(str(path)).documents == [Document("file00.py", TEXT)]


def test_the_default_text_is_the_standard_library() -> None:
    names = {document.name for document in collect(None).documents}
    assert {"typing.py", "json/decoder.py"} <= names
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "encodings", "idlelib", "site-packages"}


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\x00"])
def test_no_text_is_refused_by_path(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=str(path)):
        collect(str(path))


def test_each_record_of_jsonl_is_a_document_in_the_order_of_the_file(tmp_path: Path) -> None:
    texts = [f"{TEXT}{number}\u2028" for number in range(12)]
    lines = [
        json.dumps({"id": n, "text": text}, ensure_ascii=False) for n, text in enumerate(texts)
    ]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    documents = collect(str(tmp_path / "a.jsonl")).documents
    assert [document.text for document in documents] == texts
    assert documents[1].name == "a.jsonl:000000003"
    (tmp_path / "b.txt").write_text("more")
    assert [document.text for document in collect(str(tmp_path)).documents] == [*texts, "more"]


def test_half_a_surrogate_pair_in_json_can_still_be_written(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83db"}')
    assert [document.text for document in collect(str(tmp_path)).documents] == ["a?b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "a", "id": 1}', r'line 2: expected .*"text".*"messages".*; found body, id'),
        ('{"messages": [{"content": "a"}]}', "line 2: expected .*; found messages"),
        ('{"messages": []}', "line 2: expected .*; found messages"),
        ('{"text": 3}', "line 2: expected .*; found text"),
        ('{"text": "a", "messages": []}', 'line 2: has both "text" and "messages"'),
        ("[1]", "line 2: expected .*; found list"),
        ('{"text": "a"', "line 2: not JSON"),
    ],
)
def test_a_record_without_text_is_refused_by_its_line(
    tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(ConfigError, match=message):
        collect(str(path))


def write_some_bad(path: Path, bad: int) -> list[int]:
    """Write 40 records, ``bad`` of them bad in four ways; return the numbers of bad lines."""
    lines = [json.dumps({"text": f"text {n}"}).encode() for n in range(40)]
    kinds = [b'{"text": ', b'{"text": "\xff"}', b'{"other": 1}', b"[" * 100_000]
    for n in range(bad):
        lines[4 * n] = kinds[n % 4]
    path.write_bytes(b"\n".join(lines))
    return [4 * n + 1 for n in range(bad)]


def test_bad_records_are_counted_and_left_out_if_asked(tmp_path: Path) -> None:
    lines = write_some_bad(tmp_path / "a.jsonl", 5)
    write_some_bad(tmp_path / "b.jsonl", 2)
    with pytest.raises(ConfigError) as refused:
        collect(str(tmp_path))
    said = str(refused.value)
    assert said.startswith("7 bad records, which --skip-bad leaves out, such as --data ")
    assert [f"a.jsonl, line {n}:" in said for n in lines] == [True] * 3 + [False] * 2
    assert said.endswith("; and 4 more")
    found = collect(str(tmp_path), skip_bad=True)
    assert found.bad.count == 7 and len(found.bad.first) == 3
    names = {f"a.jsonl:{n:09d}" for n in {*range(1, 41)} - {*lines}}
    assert {one.name for one in found.documents if one.name.startswith("a")} == names
    write_some_bad(tmp_path / "b.jsonl", 1)
    with pytest.raises(ConfigError, match=r"b.jsonl, line 1: not JSON.*; --skip-bad leaves this"):
        collect(str(tmp_path / "b.jsonl"))


def test_records_that_are_all_bad_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("1\n2\n")
    with pytest.raises(ConfigError, match=r"holds no text .*bad records: .*a.jsonl, line 1: .*"):
        collect(str(tmp_path), skip_bad=True)


CHATS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes"}]}
    for n in range(3)
]


@pytest.mark.parametrize("text", [None, 5, ["a"]])
def test_a_chat_may_have_a_text_field_that_is_no_string(tmp_path: Path, text: object) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text, **chat}) for chat in CHATS))
    assert [json.loads(one.text) for one in collect(str(path)).documents] == CHATS


def test_json_nested_too_deeply_is_read_as_text(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[" * 100_000)
    (tmp_path / "b.txt").write_text("text")
    assert [one.text for one in collect(str(tmp_path)).documents] == ["[" * 100_000, "text"]


def test_an_array_of_records_is_read_as_records_and_other_json_as_text(tmp_path: Path) -> None:
    (tmp_path / "chats.json").write_text(json.dumps(CHATS))
    documents = collect(str(tmp_path)).documents
    assert [json.loads(document.text) for document in documents] == CHATS
    assert all(document.is_chat for document in documents)
    (tmp_path / "chats.json").write_text(json.dumps(CHATS[0]))
    assert [document.name for document in collect(str(tmp_path)).documents] == [
        "chats.json:000000001"
    ]
    other = json.dumps({"name": "a package"})
    (tmp_path / "chats.json").write_text(other)
    assert collect(str(tmp_path)).documents == [Document("chats.json", other)]
    (tmp_path / "chats.json").write_text(json.dumps([CHATS[0], {"body": "a"}]))
    with pytest.raises(ConfigError, match=r"record 2: expected .*found body"):
        collect(str(tmp_path))


def zstd(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard", reason="the extra zstd is not installed")
    both = [zstandard.compress(part) for part in (data[:5], data[5:])]
    return b"".join(both)  # two frames, as multi-threaded writers make


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt"])
@pytest.mark.parametrize("kind", list(COMPRESS))
def test_what_is_compressed_is_read_like_the_rest(tmp_path: Path, name: str, kind: str) -> None:
    records = [{"text": "one"}, {"text": "two"}]
    lines = "\n".join(map(json.dumps, records)) if name == "a.jsonl" else json.dumps(records)
    content = "one" if name == "a.txt" else lines
    (tmp_path / f"{name}{kind}").write_bytes(COMPRESS[kind](content.encode()))
    (tmp_path / "b.jsonl").write_text('{"text": "three"}')
    texts = [document.text for document in collect(str(tmp_path)).documents]
    assert texts == (["one", "three"] if name == "a.txt" else ["one", "two", "three"])
    (tmp_path / f"{name}{kind}").write_bytes(b"not compressed")
    with pytest.raises(ConfigError, match=f"{name}{kind}: cannot be read"):
        collect(str(tmp_path))


def test_without_its_package_zstd_is_refused_by_the_name_of_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("compression", "zstandard"):
        monkeypatch.setitem(sys.modules, package, None)
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"(\xb5/\xfd")
    (tmp_path / "b.txt").write_text(TEXT)
    for data in (path, tmp_path):
        with pytest.raises(ConfigError, match=r"a.jsonl.zst needs zstandard: pip install .*zstd"):
            collect(str(data))


def test_every_kind_of_file_that_is_not_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    names = [f"{n}.{kind}" for n in range(20) for kind in ("png", "arrow")]
    for name in (*names, "blob", "more.tar"):
        (tmp_path / name).write_bytes(b"\xff\xfe")
    assert collect(str(tmp_path)).left_out == (
        "0.arrow and 19 more *.arrow (not UTF-8)",
        "0.png and 19 more *.png (not UTF-8)",
        "blob (not UTF-8)",
        "more.tar (an archive: unpack it)",
    )


def test_of_a_folder_from_a_hub_the_split_to_train_on_is_read(tmp_path: Path) -> None:
    for name in ("data/train-00000-of-00001", "data/test-00000-of-00001", "validation/a", "more"):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(CHATS[0]))
    for name in ("README.md", "LICENSE", "dataset_infos.json"):
        (tmp_path / name).write_text("{}")
    found = collect(str(tmp_path))
    assert {document.name.partition(".")[0] for document in found.documents} == {
        "data/train-00000-of-00001",
        "more",
    }
    assert found.left_out == (
        "LICENSE (about the data)",
        "README.md (about the data)",
        "dataset_infos.json (about the data)",
        "data/test-00000-of-00001.jsonl (split test)",
        "validation/a.jsonl (split validation)",
    )
