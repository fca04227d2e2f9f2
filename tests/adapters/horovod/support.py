"""What the tests of Horovod's API share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from multiring.horovod import basics as hvd
from tests.on_ranks import on_ranks


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
