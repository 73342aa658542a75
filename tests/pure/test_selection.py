"""The variants that run by default show everything that is parametrised."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.selection import covering


@pytest.mark.parametrize("sizes", [(5,), (3, 10), (2, 3, 7), (2, 2, 2, 2, 3)])
def test_every_value_or_pair_is_there(sizes: tuple[int, ...]) -> None:
    variants = list(product(*(map(str, range(size)) for size in sizes)))
    chosen = [variants[n] for n in covering(variants)]
    width = 1 if len(sizes) < 3 else 2
    for columns in combinations(range(len(sizes)), width):
        seen = {tuple(variant[c] for c in columns) for variant in chosen}
        assert seen == set(product(*(map(str, range(sizes[c])) for c in columns)))
    largest = sorted(sizes)[-width:]
    least = largest[0] if width == 1 else largest[0] * largest[1]
    assert least <= len(chosen) <= 2 * least


def test_a_way_with_one_value_does_not_count() -> None:
    pairs = list(product("abc", map(str, range(12))))
    assert covering([(one, "x", other) for one, other in pairs]) == covering(pairs)


def test_values_are_used_alike() -> None:
    variants = list(product("abc", map(str, range(12))))
    worlds = [variants[n][0] for n in covering(variants)]
    assert {worlds.count(world) for world in "abc"} == {4}


def test_the_choice_is_the_same_in_every_process() -> None:
    """Hashes of strings are others in each."""
    variants = list(product("abc", "defg"))
    chosen = ["".join(variants[n]) for n in sorted(covering(variants))]
    assert chosen == ["ad", "ag", "be", "cf"]
