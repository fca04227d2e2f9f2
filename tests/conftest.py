"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """Gives `ranks(n)`: a pool of n ranks that all tests of the session share."""
    pools: dict[int, RankPool] = {}

    def pool(n: int) -> RankPool:
        return pools.setdefault(n, RankPool(n))

    try:
        yield pool
    finally:
        for started in pools.values():
            started.close()
