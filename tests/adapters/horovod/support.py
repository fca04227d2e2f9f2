"""What the tests of Horovod's API share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from multiring.horovod import basics as hvd
from tests.on_ranks import on_ranks

ROWS = 4  # samples of each rank


def samples_of_a_line(ranks: int) -> tuple[Any, Any]:
    """ROWS samples for each rank: inputs (samples, 3), and labels (samples, 1) that are linear in them."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(ranks * ROWS, 3))
    return x, x @ np.array([[1.0], [-2.0], [0.5]]) + 0.1


def with_hvd(*sizes: int) -> Callable[[Callable[..., Any]], Any]:
    """Runs a test on so many ranks, two where nothing is said, after hvd.init(), and then hvd.shutdown()."""

    def decorated(test: Callable[..., Any]) -> Any:
        @functools.wraps(test)
        def between(*args: Any, **kwargs: Any) -> Any:
            hvd.init(process_sets="dynamic")
            try:
                return test(*args, **kwargs)
            finally:
                hvd.shutdown()

        return on_ranks(*sizes)(between) if sizes else between

    return decorated


def refused(kind: type[Exception], calls: Mapping[str, Callable[[], object]]) -> None:
    """Expects each call to raise an error of `kind` in which its key, a regular expression, is found."""
    for text, call in calls.items():
        with pytest.raises(kind, match=text):
            call()
