"""Fixtures of the tests of what goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from multiring.benchmarks.emulation.hosts import EmulatedHosts, why_not


@pytest.fixture
def emulate() -> Iterator[Callable[[int], EmulatedHosts]]:
    """Gives `emulate(count)`, which makes emulated hosts; skips where there can be none."""
    if reason := why_not():
        pytest.skip(reason)
    with ExitStack() as made:
        yield lambda count: made.enter_context(EmulatedHosts(count))


@pytest.fixture(scope="module")
def hosts() -> Iterator[EmulatedHosts]:
    """Two emulated hosts that a module's tests share; skips where there can be none."""
    if reason := why_not():
        pytest.skip(reason)
    with EmulatedHosts(2) as made:
        yield made
