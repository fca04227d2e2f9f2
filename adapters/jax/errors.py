"""From JAX's runtime errors back to the exceptions of multiring."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from multiring import errors
from multiring.errors import MultiringError
from multiring.jax.internals import forget_failed_programs

__all__ = ["raise_errors", "to_multiring"]

_PATTERN = re.compile(
    r"multiring\.(UsageError|MismatchError|TimeoutError|PeerLostError|AbortedError|InternalError): (.*)",
    re.DOTALL,
)


def to_multiring(error: BaseException) -> MultiringError | None:
    """The exception of multiring that a runtime error of JAX stands for; None if there is none."""
    found = _PATTERN.search(str(error))
    if found is None:
        return None
    kind: type[MultiringError] = getattr(errors, found[1])
    return kind(found[2].strip())


@contextmanager
def raise_errors() -> Iterator[None]:
    """Raise the exceptions of multiring where JAX raises its runtime error.

    JAX computes ahead: an error shows where a result is looked at. Look at the results of the block inside
    of it (`jax.block_until_ready`).

        with multiring.jax.raise_errors():
            params = jax.block_until_ready(step(params, batch))

    Raises:
        MultiringError: A collective in the block failed.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        own = to_multiring(error)
        if own is None:
            raise
        forget_failed_programs()
        raise own from error
