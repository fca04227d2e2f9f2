"""Fixtures of the tests of what goes wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nursery import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Forks ranks that may be killed."""
    started = Nursery()
    try:
        yield started
    finally:
        started.close()
