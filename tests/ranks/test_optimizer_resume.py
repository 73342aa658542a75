"""Every optimizer of torch.optim resumes from a checkpoint, also with parameters of one element."""

from __future__ import annotations

import pytest

from tests.kit.optimizer_resume import FACES, resumes
from tests.ranks.pool import RankPool

PAIRS = list(zip(FACES, FACES[3:] + FACES[:3], strict=True))
CASES = [
    *((2, face, other) for face, other in PAIRS),
    *((1, face, other) for face, other in (PAIRS[1], PAIRS[5])),
    *((3, face, other) for face, other in (PAIRS[2], PAIRS[6])),
]


@pytest.mark.parametrize("half", [0, 1], ids=["even", "odd"])
@pytest.mark.parametrize(("world", "face", "other"), CASES)
def test_every_optimizer_goes_on_with_parameters_of_one_element(
    pool: RankPool, world: int, face: str, other: str, half: int
) -> None:
    for failed in pool.run(world, resumes, face, other, half, timeout_s=240):
        assert not failed, "\n".join(failed)
