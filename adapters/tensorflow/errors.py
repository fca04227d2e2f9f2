"""multiring's errors on their way through TensorFlow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf
from multiring import errors

__all__ = ["translate_errors"]

_PATTERN = re.compile(r"multiring: (\w+Error): (.*?)(?=\n|\s*\[Op:|\s*\[\[|$)")


@contextmanager
def translate_errors() -> Iterator[None]:
    """Context in which TensorFlow's errors that come from multiring's ops are raised as multiring's own.

    TensorFlow raises what an op reports as an error of its own: `tf.errors.UnavailableError` for a
    `PeerLostError`, `FailedPreconditionError` for a `MismatchError`, `DeadlineExceededError` for a
    `TimeoutError`, `AbortedError`, `InvalidArgumentError` for a `UsageError` and `InternalError`. Their text
    begins with "multiring: ".

    Raises:
        MultiringError: In place of such an error, which is its `__cause__`. All others pass.
    """
    try:
        yield
    except tf.errors.OpError as error:
        found = _PATTERN.search(str(error.message))
        kind = getattr(errors, found[1], None) if found else None
        if found is None or kind is None:
            raise
        raise kind(found[2]) from error
