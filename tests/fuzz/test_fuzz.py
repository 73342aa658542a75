"""A short run of the fuzzer on fixed cases; ``python -m tests.fuzz`` runs for hours."""

from __future__ import annotations

from functools import partial
from itertools import count, islice
from zlib import crc32

import pytest

from tests.fuzz.case import Case, read, step
from tests.fuzz.defects import DEFECTS, run_with_defect
from tests.fuzz.generate import generate, world_of
from tests.fuzz.hunt import Figures, hunt
from tests.fuzz.shrink import shrink
from tests.ranks.pool import RankPool

SEEDS = range(30)
WITHIN = 40
"""Number of fitting cases within which a planted defect must be found."""


def test_random_programs_do_as_the_unsharded_model(pool: RankPool) -> None:
    figures = Figures()
    failures = list(hunt(pool, SEEDS, figures=figures))
    assert not failures, f"{figures}\n{failures[0].text}"
    assert sum(figures.passed.values()) == len(SEEDS)


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_found(pool: RankPool, defect: str) -> None:
    wanted = DEFECTS[defect].shown_by
    fitting = (
        seed
        for seed in count()
        if world_of(seed) in (2, 4) and all(part in str(generate(seed)) for part in wanted)
    )
    seeds = list(islice(fitting, WITHIN))
    run = partial(run_with_defect, defect=defect)
    assert next(hunt(pool, seeds, figures=Figures(), run=run), None) is not None


def fingerprint(seeds: range) -> int:
    return crc32("".join(str(generate(seed)) for seed in seeds).encode())


def test_a_seed_is_the_same_case_everywhere(pool: RankPool) -> None:
    """Processes of the pool differ in their hash seeds."""
    seeds = range(300)
    assert pool.run(2, fingerprint, seeds, process_group=False) == [fingerprint(seeds)] * 2


def test_a_printed_case_can_be_read() -> None:
    for seed in range(300):
        assert read(str(generate(seed))) == generate(seed)


def test_a_case_is_shrunk_to_what_fails() -> None:
    """The made-up failure needs an embedding and a clipping step, and nothing else."""

    def fails(case: Case) -> bool:
        kinds = [node.kind for node in case.model.nodes]
        return "embed" in kinds and any(one.op == "clip" for one in case.steps)

    failing = [case for case in map(generate, range(400)) if fails(case)]
    assert len(failing) > 20
    for case in failing[:20]:
        small = shrink(case, fails, tries=2000)
        assert [one.op for one in small.steps] == [step("clip").op]
        assert len(small.model.nodes) <= 2  # the root may be another module
        assert small.world == 1
