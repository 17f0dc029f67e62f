"""What tests share: one pool of four rank processes for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks.run(n, fn, *args)` -> per-rank results of fn(*args) on n <= 4 gloo processes."""
    pool = RankPool(4)
    yield pool
    pool.close()
