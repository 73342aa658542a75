"""The files that CONTRIBUTING.md and docs/architecture.md name exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.pure.import_rules import ROOMS

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


MAP = (ROOT / "docs" / "architecture.md").read_text()


def test_the_map_has_each_package_with_the_first_sentence_of_its_docstring() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", MAP, re.M)
    expected = []
    for room in (room for room in ROOMS if room != "_version"):
        package = SOURCE / room / "__init__.py"
        path = package if package.exists() else SOURCE / f"{room}.py"
        doc = ast.get_docstring(ast.parse(path.read_text())) or ""
        expected.append((room, doc.splitlines()[0].replace("``", "`")))
    assert rows[-len(expected) :] == expected


def test_the_paths_of_the_map_are_those_of_files_and_functions() -> None:
    paths = MAP[MAP.index("## Sharding") : MAP.index("## Packages")]
    steps = re.findall(r"(\w+/\w+\.py)(?:: (\w+))?", paths)
    assert len(steps) >= 20
    for path, name in steps:
        text = (SOURCE / path).read_text()
        assert not name or re.search(rf"^ *(def|class) {name}\b", text, re.M), (path, name)


def test_the_tests_of_the_invariants_exist() -> None:
    rows = MAP[MAP.index("## Ten invariants") : MAP.index("## Registries")]
    named = re.findall(r"`(tests/[\w/]+(?:\.py)?)(?:::(\w+))?`", rows)
    assert rows.count("\n| ") == 11 and len(named) >= 10  # ten rows and the header
    for path, name in named:
        file = ROOT / path
        assert file.exists()
        assert not name or re.search(rf"^def {name}\b", file.read_text(), re.M), (path, name)


CORE = ("layout", "schedule", "tensors", "engine", "frontend", "wrap", "flat", "compat")
WEAK = ("weakref.Weak", "Weak")


def registries() -> set[str]:
    """Return the module-level weak collections, and dicts and sets that start empty."""
    found = set()
    for room in CORE:
        for path in sorted((SOURCE / room).glob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                    continue
                value = ast.unparse(node.value) if node.value is not None else ""
                if node.target.id.startswith("_") and (
                    value.startswith(WEAK) or value in ("{}", "set()")
                ):
                    found.add(f"{room}/{path.name}: {node.target.id}")
    return found


def test_the_map_lists_the_registries() -> None:
    rows = re.findall(r"^\| `([a-z_/]+\.py: _\w+)` \|", MAP, re.M)
    assert registries() == set(rows)
