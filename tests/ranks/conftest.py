"""The pool, once per session and only if a test asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.pool import RankPool


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Iterator[RankPool]:
    """The session's gloo processes; the first ``pool.run`` starts them.

    Jobs run under the same warning filters as the tests, so that a warning on a rank fails too.
    """
    with RankPool(warning_filters=pytestconfig.getini("filterwarnings")) as ranks:
        yield ranks
