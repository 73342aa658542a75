"""Words and figures of messages: bytes have the same units everywhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fullshard
from fullshard.comm.text import in_bytes
from fullshard.frontend.blocks import Choice

SIZES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (1 << 20, "1.05 MB"),
        (1_050_000_000, "1.05 GB"),
        (12_345_678_901_234_567, "12346 TB"),
    ],
)
def test_bytes_have_three_digits_and_a_unit_of_a_thousand(nbytes: int, text: str) -> None:
    assert in_bytes(nbytes) == text


@given(st.integers(0, 10**17))
def test_bytes_say_their_number_within_half_a_percent(nbytes: int) -> None:
    figure, unit = in_bytes(nbytes).split()
    assert re.fullmatch(r"\d+(\.\d+)?", figure) and len(figure.replace(".", "").lstrip("0")) <= 6
    assert float(figure) * SIZES[unit] == pytest.approx(nbytes, rel=0.005)
    assert float(figure) < 1000 or unit == "TB"


def test_a_choice_has_no_powers_of_ten() -> None:
    text = str(Choice(prefetch_nbytes=1_050_000_000, reduction_nbytes=524_000_000))
    assert "1.05 GB gathered ahead" in text and "524 MB in reductions" in text


def test_no_message_divides_bytes_by_itself() -> None:
    root = Path(fullshard.__file__).parent
    by_hand = re.compile(r"nbytes\)? (?:/ 1e\d|>> \d0)\b.*[}]")
    found = [
        f"{path.relative_to(root)}:{number}"
        for path in sorted(root.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if by_hand.search(line) or (" MiB" in line and "{" in line)
    ]
    assert found == []
