"""What the functions of the adapter check before they trace anything."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

import jax
import jax.numpy as jnp
from multiring.derived import resolve
from multiring.errors import UsageError
from multiring.reductions import ScaleKeywords
from multiring.types import ReduceOpName

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["as_arrays", "as_factors", "call_site", "check_op", "resolve"]

DTYPES = (
    "bool",
    *(f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u")),
    *("float16", "bfloat16", "float32", "float64"),
)


def check_op(comm: Communicator, op: str) -> None:
    """Raise UsageError unless it is the name of a reduction."""
    if op not in (accepted := get_args(ReduceOpName)):
        raise UsageError(f"rank {comm.rank}: op is {op!r}; accepted: {', '.join(accepted)}")


def as_factors(scale: ScaleKeywords) -> dict[str, Any]:
    """Factors as the core takes them."""
    return {"prescale": float(scale.get("prescale", 1.0)), "postscale": float(scale.get("postscale", 1.0))}


def call_site() -> str:
    """File and line of the program that has called multiring; nothing where JAX has called it.

    What JAX calls it calls while it traces, at a place of the program that depends on what has been traced
    before. Files without their folders: these may differ between hosts.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _package(frame) == "multiring":
        frame = frame.f_back
    if frame is None or _package(frame) in ("jax", "jaxlib"):
        return ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _check_range(comm: Communicator, value: Any, label: str) -> None:
    """Raise UsageError where JAX would keep 32 bits of a number of 64 and change its value by that."""
    if isinstance(value, jax.Array):
        return
    for part in jax.tree.leaves(value):
        if not isinstance(part, bool | int | float | np.generic | np.ndarray):
            continue
        try:
            given = np.asarray(part)
            narrow = jax.dtypes.canonicalize_dtype(given.dtype)
        except (OverflowError, TypeError):
            continue  # JAX says what is wrong
        if given.dtype == narrow or given.size == 0 or given.dtype.kind not in "iuf":
            continue
        limits: Any = np.finfo(narrow) if given.dtype.kind == "f" else np.iinfo(narrow)
        finite = given[np.isfinite(given)]
        if finite.size and (finite.min() < limits.min or finite.max() > limits.max):
            raise UsageError(
                f"rank {comm.rank}: '{label}' is {given.dtype} with values from {finite.min()} to "
                f"{finite.max()}; without jax_enable_x64 JAX makes {narrow} of it, which cannot hold them: "
                "call jax.config.update('jax_enable_x64', True) first, or scale the values"
            )


def as_arrays(comm: Communicator, values: Sequence[Any], labels: Sequence[str]) -> list[jax.Array]:
    """The values as arrays of one device and of a dtype that can travel.

    Raises:
        UsageError: One is spread over several devices, of another dtype, or does not fit JAX's.
    """
    arrays = []
    for value, label in zip(values, labels, strict=True):
        _check_range(comm, value, label)
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
