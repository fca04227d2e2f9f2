"""Fixtures of the tests of what goes wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from multiring.models.bench.emulated_hosts import EmulatedHosts, why_not
from tests.nursery import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Forks ranks that may be killed."""
    started = Nursery()
    try:
        yield started
    finally:
        started.close()


@pytest.fixture
def hosts() -> Iterator[EmulatedHosts]:
    """Two emulated hosts; skips where there can be none."""
    if reason := why_not():
        pytest.skip(reason)
    with EmulatedHosts(2) as emulated:
        yield emulated
