"""Every behaviour of PyTorch's FSDP2 in ``tests/rows.toml`` has tests that exist."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TABLE: dict[str, Any] = tomllib.loads((ROOT / "tests" / "rows.toml").read_text())
ROWS: dict[str, dict[str, Any]] = TABLE["row"]
DEFECTS: dict[str, dict[str, Any]] = TABLE["defect"]

# Number of behaviours in each section; those of chapter 2 have numbers of their own.
SECTIONS = {"1.2": 15, "1.3": 26, "1.4": 5, "1.5": 2, "1.6": 4, "1.7": 5, "1.8": 1}
SECTIONS |= {f"2.{number}": 1 for number in range(1, 25)}

each_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
each_defect = pytest.mark.parametrize("defect", DEFECTS.values(), ids=DEFECTS)


@cache
def functions_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def missing(tests: list[str]) -> list[str]:
    """Return the tests that do not exist."""
    return [test for test in tests if not is_there(test)]


def is_there(test: str) -> bool:
    """Return whether a test exists; a name in brackets is a program of the same file."""
    match = re.fullmatch(r"(tests/[\w/]+\.py)::(test_\w+)(?:\[(\w+)\])?", test)
    if match is None or not (ROOT / match[1]).is_file():
        return False
    return {match[2], match[3] or match[2]} <= functions_in(match[1])


def runs_beside_torch(test: str) -> bool:
    path, _, name = test.partition("::")
    text = (ROOT / path).read_text()
    return "torch.distributed.fsdp" in text or ("tests.ranks.rows" in text and "[" in name)


def test_every_behaviour_is_there_once() -> None:
    assert Counter(name.split()[0] for name in ROWS) == Counter(SECTIONS)
    assert list(DEFECTS) == [str(number) for number in range(1, 16)]


@each_row
def test_a_row_has_its_evidence(row: dict[str, Any]) -> None:
    assert row["says"]
    if row.get("outcome", "better") == "better":
        assert row["tests"] and missing(row["tests"]) == []
        assert any(map(runs_beside_torch, row["tests"])), "no test compares with PyTorch"
    else:
        assert row["outcome"] == "not on CPU" and len(row["reason"]) > 10 and "tests" not in row


@each_defect
def test_a_defect_has_a_test_of_its_own(defect: dict[str, Any]) -> None:
    assert defect["tests"] and missing(defect["tests"]) == []


def test_programs_are_run() -> None:
    """A program in brackets is a parameter of its test; an unused one would prove nothing."""
    for row in ROWS.values():
        for test in row.get("tests", ()):
            path, _, name = test.partition("::")
            match = re.fullmatch(r"(test_\w+)\[(\w+)\]", name)
            if match is None:
                continue
            tree = ast.parse((ROOT / path).read_text())
            (function,) = (
                node
                for node in tree.body
                if isinstance(node, ast.FunctionDef) and node.name == match[1]
            )
            given = {
                part.id
                for call in function.decorator_list
                if isinstance(call, ast.Call)
                for arg in call.args
                for part in ast.walk(arg)  # inside pytest.param too
                if isinstance(part, ast.Name)
            }
            assert match[2] in given, test
