"""Fixtures of the tests of what goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from multiring.benchmarks.emulation.hosts import EmulatedHosts, why_not
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
def emulate() -> Iterator[Callable[[int], EmulatedHosts]]:
    """Gives `emulate(count)`, which makes emulated hosts; skips where there can be none."""
    if reason := why_not():
        pytest.skip(reason)
    with ExitStack() as made:
        yield lambda count: made.enter_context(EmulatedHosts(count))


@pytest.fixture
def hosts(emulate: Callable[[int], EmulatedHosts]) -> EmulatedHosts:
    """Two emulated hosts; skips where there can be none."""
    return emulate(2)


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[EmulatedHosts]:
    """Two emulated hosts that a module's tests share; skips where there can be none."""
    if reason := why_not():
        pytest.skip(reason)
    with EmulatedHosts(2) as made:
        yield made
