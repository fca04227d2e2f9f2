"""What the tests of Horovod's API share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from multiring.horovod import basics as hvd

__all__ = ["with_hvd"]


def with_hvd(test: Callable[..., Any]) -> Callable[..., Any]:
    """Calls hvd.init() before a test on ranks, and hvd.shutdown() after it."""

    @functools.wraps(test)
    def between(*args: Any, **kwargs: Any) -> Any:
        hvd.init(process_sets="dynamic")
        try:
            return test(*args, **kwargs)
        finally:
            hvd.shutdown()

    return between
