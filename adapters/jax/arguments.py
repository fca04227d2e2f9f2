"""What the functions of the adapter check before they trace anything."""

from __future__ import annotations

import itertools
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

_JAX = ("jax", "jaxlib")

DTYPES = (
    "bool",
    *(f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u")),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)


def check_op(comm: Communicator, op: str) -> None:
    """Raise UsageError unless it is the name of a reduction."""
    if op not in (accepted := get_args(ReduceOpName)):
        raise UsageError(f"rank {comm.rank}: op is {op!r}; accepted: {', '.join(accepted)}")


def as_factors(scale: ScaleKeywords) -> dict[str, Any]:
    """Factors as the core takes them."""
    return {"prescale": float(scale.get("prescale", 1.0)), "postscale": float(scale.get("postscale", 1.0))}


def call_site() -> str:
    """Return file, line and column of the call of multiring in the program, "" where JAX has made it; and the
    same of the lambda that JAX traces, if the call is not written in it.

    JAX makes calls while it traces, at a place of the program that depends on what has been traced before; so
    what lies beyond the function that it traces is left out. Files come without their folders, which may
    differ between hosts.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _package(frame) == "multiring":
        frame = frame.f_back
    if frame is None or _package(frame) in _JAX:
        return ""
    site = _place(frame)
    traced = frame
    while traced.f_back is not None and _package(traced.f_back) not in _JAX:
        traced = traced.f_back
    is_other = traced.f_back is not None and traced is not frame and traced.f_code.co_name == "<lambda>"
    return f"{site} by the lambda at {_place(traced)}" if is_other else site


def _place(frame: FrameType) -> str:
    """Return file, line and column of the call that a function is in."""
    _, _, column, _ = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return place if column is None else f"{place}:{column + 1}"


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
