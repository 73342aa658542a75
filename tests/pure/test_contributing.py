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


def test_the_map_names_every_file_of_every_room() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = text[text.index("## Rooms") : text.index("## The scheduler")]
    entries = re.split(r"^- ", rooms, flags=re.M)[1:]
    named = {
        room: set(re.findall(r"`(\w+)`", entry))
        for entry in entries
        for room in re.findall(r"\*\*`(\w+)/`", entry)
    }
    there = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert set(named) == there
    missing = [
        f"{room}/{path.stem}"
        for room in there - {"train", "cli"}  # which use public names only
        for path in (SOURCE / room).glob("[!_]*.py")
        if path.stem not in named[room]
    ]
    assert missing == []


def test_the_ways_through_the_files_name_files() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    ways = text[text.index("The way of one parameter") : text.index("## Vocabulary")]
    named = re.findall(r"`(\w+/\w+)(?:\.\w+)?`", ways)
    assert len(named) >= 15
    assert [name for name in named if not (SOURCE / f"{name}.py").exists()] == []
