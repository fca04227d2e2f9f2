"""Fixtures of the tests about faults and about several hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from multiring.models.bench.emulated_hosts import EmulatedHosts, why_not


@pytest.fixture
def hosts() -> Iterator[EmulatedHosts]:
    """Two emulated hosts; skips where there can be none."""
    if reason := why_not():
        pytest.skip(reason)
    with EmulatedHosts(2) as emulated:
        yield emulated
