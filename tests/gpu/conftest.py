"""What a test runs on: a library of arrays that sees a device here, named in the brackets after the test."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.gpu.devices import why_not

_HERE = Path(__file__).parent
_missing = functools.cache(why_not)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE not in item.path.parents:
            continue
        name = "cupy" if "cupy" in item.name else "torch"
        if (reason := _missing(name)) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
