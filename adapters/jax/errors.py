"""From JAX's runtime errors back to the exceptions of multiring."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
from multiring.error_text import find_error
from multiring.jax.internals import forget_failed_programs

__all__ = ["raise_errors"]


@contextmanager
def raise_errors() -> Iterator[None]:
    """Raise the exceptions of multiring where JAX raises its runtime error.

    JAX computes ahead: an error shows where a result is looked at. Look at the results of the block inside
    of it (`jax.block_until_ready`).

        with multiring.jax.raise_errors():
            params = jax.block_until_ready(step(params, batch))

    Raises:
        MultiringError: A collective in the block failed. It has all attributes, unless
            many errors came since.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        own = find_error(str(error))
        if own is None:
            raise
        forget_failed_programs()
        raise own from error
