"""Fixtures of the tests of training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import multiring
from multiring import Communicator


@pytest.fixture
def comm() -> Iterator[Communicator]:
    """This process alone."""
    yield multiring.init()
    multiring.shutdown()
