"""The pages for users: differences with tests, concepts with pictures."""

from __future__ import annotations

import ast
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.kit.docs import anchors

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
CONCEPTS = ["Unit", "Shard", "Reshard", "Prefetch", "Mixed precision"]
# The picture of docs/scale.md is drawn by matplotlib, and is not a concept's.
PICTURES = [
    one for one in sorted((ROOT / "docs" / "pictures").glob("*.svg")) if one.name != "scale.svg"
]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
SVG = "{http://www.w3.org/2000/svg}"

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
each_picture = pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)


@each_page
def test_lines_are_short(page: Path) -> None:
    text = re.sub(
        r"<!-- (frameworks|faults) -->.*<!-- end of", "", page.read_text(), flags=re.DOTALL
    )
    lines = [line for line in text.splitlines() if not line.startswith("|")]
    assert [line for line in lines if len(line) > 105] == []


@each_page
def test_what_a_page_points_to_is_there(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\(([^)#]+)\)", text)
    named = re.findall(r"`((?:docs|examples|tests|src)/[\w/.-]*)`", text)
    here = [link for link in links if not link.startswith("https:")]
    missing = [link for link in here if not (page.parent / link).is_file()]
    assert missing + [name for name in named if not (ROOT / name).exists()] == []


@each_page
def test_sections_that_a_page_points_to_are_there(page: Path) -> None:
    for path, anchor in re.findall(r"\]\(([^)#:]*\.md)?#([^)]+)\)", page.read_text()):
        assert anchor in anchors(page.parent / path if path else page), f"{path}#{anchor}"


def test_each_difference_has_its_test() -> None:
    """Every item of the first three sections names tests, and all named tests exist."""
    page = (ROOT / "docs" / "differences.md").read_text()
    _, *sections = re.split(r"^## ", page, flags=re.MULTILINE)
    listed = [
        item for section in sections[:3] for item in re.split(r"^- ", section, flags=re.M)[1:]
    ]
    assert len(listed) > 30
    assert [item for item in listed if not re.search(r"`test_\w+", item)] == []
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    names = re.findall(r"`(test_\w+)(?:\[(\w+)\])?`", page)
    assert [name for pair in names for name in pair if name and f"def {name}(" not in sources] == []


def test_each_concept_has_one_picture() -> None:
    _, *sections = re.split(
        r"^## ", (ROOT / "docs" / "concepts.md").read_text(), flags=re.MULTILINE
    )
    pictures = {
        section.splitlines()[0]: re.findall(r"!\[[^]]+\]\(pictures/([\w-]+\.svg)\)", section)
        for section in sections
    }
    assert pictures.pop("Other words") == []  # a glossary has no picture
    assert list(pictures) == CONCEPTS
    shown = [name for names in pictures.values() for name in names]
    assert sorted(shown) == [picture.name for picture in PICTURES]
    assert len(shown) == len(CONCEPTS)


@each_picture
def test_a_picture_stands_on_a_ground_of_its_own(picture: Path) -> None:
    """A picture has an opaque background, for light and dark pages, and loads nothing."""
    svg = ElementTree.parse(picture).getroot()
    assert svg.tag == SVG + "svg" and svg.get("viewBox")
    assert svg.find(SVG + "title") is not None
    ground = svg.find(SVG + "rect")
    assert ground is not None
    width, height = (svg.get("viewBox") or "").split()[2:]
    assert (ground.get("width"), ground.get("height")) == (width, height)
    assert ground.get("fill") not in (None, "none")
    assert not re.search(
        r"href|@import|url\(|<script|<image", picture.read_text().partition("?>")[2]
    )


@each_example
def test_an_example_is_short_and_says_how_to_run_it(example: Path) -> None:
    source = example.read_text()
    explained = ast.get_docstring(ast.parse(source)) or ""
    assert len(source.splitlines()) < 80
    for command in ("python examples/", "torchrun --nproc-per-node 2 examples/"):
        assert command + example.relative_to(ROOT / "examples").as_posix() in explained
