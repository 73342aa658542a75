"""CONTRIBUTING.md and docs/architecture.md speak of files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "fullshard"
ANSWERS = re.findall(
    r"^\| .+\? \| `([\w/]+\.py)` \| `(\w+)` \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M
)


def test_there_are_answers() -> None:
    assert len(ANSWERS) >= 10


@pytest.mark.parametrize("file,begin", ANSWERS)
def test_a_question_is_answered_by_a_file_and_what_it_defines(file: str, begin: str) -> None:
    assert re.search(rf"^ *(def|class) {begin}\b", (SOURCE / file).read_text(), re.M)


def test_the_rooms_of_the_map_are_those_that_there_are() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    start = text.index("    src/fullshard/")
    named = set(re.findall(r"\b(\w+)/", text[start : text.index("    tests/", start)]))
    rooms = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert rooms <= named


def test_the_ways_through_the_files_name_files() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    ways = text[text.index("The way of one parameter") : text.index("## Vocabulary")]
    named = re.findall(r"`(\w+/\w+)(?:\.\w+)?`", ways)
    assert len(named) >= 15
    assert [name for name in named if not (SOURCE / f"{name}.py").exists()] == []
