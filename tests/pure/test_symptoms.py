"""The entries of ``docs/symptoms.md``, and the origin of the texts which it quotes.

A heading that is one piece of code is a literal text of fullshard, with ``...`` for variable parts.
A comment below the heading names another source. The source is ``torch: FILE`` of the installed
PyTorch (if needed with the part of the text that the file contains), or a program whose sources are
not installed.
"""

from __future__ import annotations

import ast
import mmap
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import fullshard.compat
from fullshard import errors
from tests.kit.docs import anchors

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "symptoms.md"
TEXT = PAGE.read_text()
ENTRIES = re.split(r"^### ", TEXT, flags=re.MULTILINE)[1:]
QUOTED = re.findall(r"^### `([^`]+)`\n(?:<!-- (.+) -->\n)?", TEXT, re.MULTILINE)
OURS = [text for text, source in QUOTED if not source]
TORCHS = [(text, source[7:]) for text, source in QUOTED if source.startswith("torch: ")]
PINNED = "2.13"
THEIRS = set("backward compile device full_tensor grad no_grad parameters save to_empty".split())
THEIRS.add("get_base_model")
"""Methods of PyTorch and peft that the pages call."""


@cache
def texts_of(path: Path) -> list[str]:
    """Return the strings in a module, with "..." for formatted values."""
    tree = ast.parse(path.read_text())
    joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in joined for part in node.values}
    single = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts
    ]
    return [*map(_joined, joined), *single]


def _joined(node: ast.JoinedStr) -> str:
    parts = (part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
    return "".join(map(str, parts))


def texts_of_fullshard() -> Iterator[str]:
    for path in sorted((ROOT / "src" / "fullshard").rglob("*.py")):
        yield from texts_of(path)


def occurs(quoted: str, text: str) -> bool:
    return re.search(".*".join(map(re.escape, quoted.split("..."))), text, re.DOTALL) is not None


def test_there_are_enough_entries() -> None:
    by_class = TEXT.index("## Errors by class")
    assert TEXT[:by_class].count("\n### ") >= 80
    assert len(OURS) >= 40 and len(TORCHS) >= 6


def test_headings_are_unique() -> None:
    headings = [entry.splitlines()[0] for entry in ENTRIES]
    assert sorted(set(headings)) == sorted(headings)
    assert len(anchors(PAGE)) == len(re.findall(r"^#+ ", TEXT, re.MULTILINE))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.splitlines()[0])
def test_an_entry_is_short_and_says_where_to_read_on(entry: str) -> None:
    lines = [line for line in entry.partition("\n## ")[0].splitlines()[1:] if line]
    assert 1 <= len([line for line in lines if not line.startswith("<!--")]) <= 6
    is_class = hasattr(errors, entry.splitlines()[0])
    assert is_class or re.search(r"\]\([\w/-]+\.md", entry)


@pytest.mark.parametrize("quoted", OURS)
def test_a_text_of_ours_is_in_the_source(quoted: str) -> None:
    assert any(occurs(quoted, text) for text in texts_of_fullshard())


@pytest.mark.parametrize("quoted, source", TORCHS)
def test_a_text_of_pytorch_is_in_pytorch(quoted: str, source: str) -> None:
    if not torch.__version__.startswith(PINNED):
        pytest.skip(f"the page quotes PyTorch {PINNED}, this is {torch.__version__}")
    file, _, piece = source.partition(": ")
    path = Path(torch.__file__).parent / file
    if path.suffix == ".py":
        assert any(occurs(piece or quoted, text) for text in texts_of(path))
        return
    with path.open("rb") as binary, mmap.mmap(binary.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for part in (piece or quoted).split("..."):
            assert data.find(part.encode()) >= 0, part


@pytest.mark.parametrize("name", errors.__all__)
def test_an_error_class_has_an_entry_and_points_to_it(name: str) -> None:
    assert name.lower() in anchors(PAGE)
    assert f"docs/symptoms.md#{name.lower()}" in (getattr(errors, name).__doc__ or "")


PAGES = [PAGE, *sorted((ROOT / "docs" / "recipes").glob("*.md"))]


def prose_of(page: Path) -> str:
    """Return the page without its programs, which tests/ranks/test_recipes.py runs."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@cache
def source() -> str:
    return "".join(path.read_text() for path in (ROOT / "src" / "fullshard").rglob("*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_public_names_of_a_page_exist(page: Path) -> None:
    for name in re.findall(r"`(?:with )?fullshard\.([\w.]+)", prose_of(page)):
        found: object = fullshard
        for part in name.split("."):
            assert hasattr(found, part), name
            found = getattr(found, part)
    for method in re.findall(r"\.(\w+)\(", prose_of(page)):
        assert re.search(rf"(def|class) {method}\b", source()) or method in THEIRS, method


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_of_a_page_exist(page: Path) -> None:
    for command in re.findall(r"`fullshard ([^`]+)`", prose_of(page)):
        for option in re.findall(r"--(?:no-)?([a-z-]+)", command):
            name = option.replace("-", "_")
            assert re.search(rf'"--{option}\b|\b{name}\b', source()), option
