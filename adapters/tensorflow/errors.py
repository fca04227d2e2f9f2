"""multiring's errors on their way through TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf
from multiring.error_text import find_error

__all__ = ["translate_errors"]


@contextmanager
def translate_errors() -> Iterator[None]:
    """Context in which TensorFlow's errors that come from multiring's ops are raised as multiring's own.

    TensorFlow raises what an op reports as an error of its own: `tf.errors.UnavailableError` for a
    `PeerLostError`, `FailedPreconditionError` for a `MismatchError`, `DeadlineExceededError` for a
    `TimeoutError`, `AbortedError`, `InvalidArgumentError` for a `UsageError` and `InternalError`. Their text
    begins with "multiring error" and a number, by which the original is found again.

    Raises:
        MultiringError: In place of such an error, which is its `__cause__`. It has all attributes, unless
            many errors came since. All others pass.
    """
    try:
        yield
    except tf.errors.OpError as error:
        own = find_error(str(error.message))
        if own is None:
            raise
        raise own from error
