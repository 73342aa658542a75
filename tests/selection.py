"""Which variants of a test run by default; with ``--all``, or a file named, every one does.

A test that is parametrised in two or more ways has the product of them as variants, most of which
show what others show. Of those with many, each value runs at least once, of three or more ways
each pair of values, in an order that uses all values alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

__all__ = ["MANY", "covering"]

MANY = 4
"""Up to so many variants of a test all run."""


def covering(variants: Sequence[tuple[str, ...]]) -> set[int]:
    """Numbers of variants that have each value, or of three or more ways each pair, among them.

    A way with one value only, such as one whose others run with ``--all``, does not count.
    """
    ways = [values for values in zip(*variants, strict=True) if len(set(values)) > 1]
    covered = [_parts(variant) for variant in zip(*ways, strict=True)]
    wanted = set().union(*covered)
    uses: Counter[tuple[tuple[int, str], ...]] = Counter()
    chosen: set[int] = set()
    while wanted:
        best = max(
            (number for number in range(len(variants)) if number not in chosen),
            key=lambda n: (len(covered[n] & wanted), -sum(uses[part] for part in covered[n]), -n),
        )
        chosen.add(best)
        wanted -= covered[best]
        uses.update(covered[best])
    return chosen


def _parts(variant: tuple[str, ...]) -> set[tuple[tuple[int, str], ...]]:
    """What a variant shows: its values, or pairs of them."""
    return set(combinations(enumerate(variant), 1 if len(variant) < 3 else 2))
