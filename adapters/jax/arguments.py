"""What the functions of the adapter check before they trace anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import multiring
from multiring.errors import UsageError
from multiring.jax.primitive import OPS

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["as_arrays", "check_op", "resolve"]

DTYPES = (
    "bool",
    *(f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u")),
    *("float16", "bfloat16", "float32", "float64"),
)


def resolve(comm: Communicator | None) -> Communicator:
    """The communicator to use: the world where none is given."""
    return multiring.world() if comm is None else comm


def check_op(comm: Communicator, op: str) -> None:
    """Raise UsageError unless it is the name of a reduction."""
    if op not in OPS:
        raise UsageError(f"rank {comm.rank}: op is {op!r}; accepted: {', '.join(OPS)}")


def as_arrays(comm: Communicator, values: Sequence[Any], labels: Sequence[str]) -> list[jax.Array]:
    """The values as arrays of one device and of a dtype that can travel.

    Raises:
        UsageError: One is spread over several devices, or of another dtype.
    """
    arrays = []
    for value, label in zip(values, labels, strict=True):
        array = jnp.asarray(value)
        if array.dtype.name not in DTYPES:
            raise UsageError(
                f"rank {comm.rank}: '{label}' has dtype {array.dtype.name}, which cannot travel; use one of "
                f"{', '.join(DTYPES)}"
            )
        if not isinstance(array, jax.core.Tracer) and len(array.sharding.device_set) > 1:
            raise UsageError(
                f"rank {comm.rank}: '{label}' is spread over {len(array.sharding.device_set)} devices of "
                "this process; multiring works with one device per process: start more processes instead, or "
                "move the array to one device with jax.device_put"
            )
        arrays.append(array)
    return arrays
