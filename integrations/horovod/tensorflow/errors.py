"""The errors of collectives as TensorFlow's: those that an operation of a graph reports, and the same where
there is no graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from multiring.horovod.exceptions import HorovodInternalError

__all__ = ["code_of", "raised_as_tensorflow"]


class CollectiveError(tf.errors.FailedPreconditionError, HorovodInternalError):
    """An operation failed on all ranks, outside of a graph."""


class ArgumentError(tf.errors.InvalidArgumentError, ValueError):
    """An argument is not accepted, outside of a graph."""


def code_of(error: BaseException) -> int:
    """TensorFlow's code for what was raised."""
    if isinstance(error, HorovodInternalError):
        return int(tf.errors.FAILED_PRECONDITION)
    if isinstance(error, ValueError):
        return int(tf.errors.INVALID_ARGUMENT)
    return int(tf.errors.UNIMPLEMENTED if isinstance(error, NotImplementedError) else tf.errors.INTERNAL)


@contextmanager
def raised_as_tensorflow() -> Iterator[None]:
    """Context in which errors of collectives are raised as TensorFlow's, which are also what they were."""
    try:
        yield
    except tf.errors.OpError:
        raise
    except HorovodInternalError as error:
        raise CollectiveError(None, None, str(error)) from error
    except ValueError as error:
        raise ArgumentError(None, None, str(error)) from error
