"""What a test runs on: a library of arrays that sees a device here, by the test's name or its parameters.

Tests with "fake" in their names run everywhere, in ranks that have a stand-in for the driver (stand_in.py);
those of which a parameter is "cpu" do as well, with Torch's tensors on the CPU (late_tensors.py).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu import stand_in
from tests.gpu.devices import why_not
from tests.rank_pool import RankPool, RankProcesses

_HERE = Path(__file__).parent
_missing = functools.cache(why_not)


def _library(item: str) -> str:
    if "cpu" in item.partition("[")[2].rstrip("]").split("-"):
        return "cpu"
    return next((name for name in ("cupy", "fake", "jax") if name in item), "torch")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE not in item.path.parents:
            continue
        if (reason := _missing(_library(item.name))) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def fake_processes() -> Iterator[RankProcesses]:
    """Ranks of their own, for what has loaded the stand-in sees devices."""
    processes = RankProcesses(3, stand_in.environment())
    yield processes
    processes.close()


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> RankPool:
    """As in tests/conftest.py, on ranks that see the devices of the test's library."""
    size = getattr(request, "param", 2)
    if _library(request.node.name) == "fake":
        return RankPool(size, processes=request.getfixturevalue("fake_processes"))
    pool: RankPool = request.getfixturevalue("spread")(size, 1)
    return pool
