"""The tests that the list of left-out tests names exist."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from tests.selection import left_out

ROOT = Path(__file__).parents[2]


def test_tests_that_are_left_out_exist() -> None:
    assert left_out()
    names = defaultdict(set)
    for test in left_out():
        path, _, rest = test.partition("::")
        names[path].add(re.split(r"[\[:]", rest)[0])
    for path, found in names.items():
        text = (ROOT / path).read_text()
        missing = {name for name in found if not re.search(rf"\b(def|class) {name}\b", text)}
        assert not missing, f"{path} has no {missing}: correct tests/left_out.txt"


def test_few_pure_tests_are_left_out() -> None:
    assert len([test for test in left_out() if test.startswith("tests/pure/")]) < 10
