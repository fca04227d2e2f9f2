"""Arrays of NumPy and CuPy on their way through the core, which takes both where they lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chainer.backends import cuda
from multiring.arrays import contiguous, without_mask
from multiring.arrays import joined as arrays_joined
from multiring.errors import UsageError

__all__ = [
    "Array",
    "check_dtype",
    "check_same_dtype",
    "empty",
    "is_array",
    "joined",
    "on_device",
    "ordered",
    "to_device",
    "to_host",
]

Array = NDArray[Any]

_NAMES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
_DTYPES = {np.dtype(name) for name in _NAMES.split()}


def is_array(x: object) -> bool:
    """Whether `x` is an array, or a scalar, of NumPy or CuPy."""
    return isinstance(x, np.ndarray | np.generic | cuda.ndarray)


def on_device(x: object) -> bool:
    """Whether `x` is an array in a device's memory."""
    return isinstance(x, cuda.ndarray) and not isinstance(x, np.ndarray)


def ordered(x: Any) -> Any:
    """`x` in C order, where it lies; itself where it is so already."""
    return contiguous(x) if on_device(x) else np.asarray(without_mask(x), order="C")


def empty(shape: tuple[int, ...], dtype: Any, device: bool) -> Any:
    """A new array: on the current device if asked for and there is one, else in host memory. What a peer has
    sent is received before `to_device` says that there is no device."""
    return cuda.cupy.empty(shape, dtype) if device and cuda.available else np.empty(shape, dtype)


def joined(arrays: Sequence[Any]) -> Any:
    """The elements of arrays of one dtype, all on the device or all in host memory, one after the other."""
    with arrays[0].device if on_device(arrays[0]) else nullcontext():
        return arrays_joined(arrays)


def to_host(x: Any) -> Array:
    """`x` in C order in host memory; itself where it is so already. Waits for the device's stream: for what
    is compared, not for what is sent."""
    return np.asarray(cuda.to_cpu(x), order="C")


def to_device(x: Any, device: bool) -> Any:
    """`x` where its receiver wants it: on the current device, or as it is.

    Raises:
        UsageError: There is no device.
    """
    if not device:
        return x
    if not cuda.available:
        raise UsageError(
            "an array of CuPy was sent to this rank, and there is no CuPy: install it here too, or send "
            "chainer.backends.cuda.to_cpu(array)"
        )
    return cuda.cupy.asarray(x)


def check_dtype(operation: str, x: Any) -> None:
    """Raise TypeError unless `operation` can carry the dtype of `x`, and UsageError if `x` is masked."""
    without_mask(x, f"{operation}: an array")
    if np.dtype(x.dtype) not in _DTYPES:
        raise TypeError(
            f"{operation} does not support dtype {x.dtype}; send complex numbers as pairs of reals"
        )


def check_same_dtype(operation: str, dtypes: Iterable[Any]) -> None:
    """Raise TypeError if dtypes differ."""
    found = sorted({np.dtype(dtype).name for dtype in dtypes})
    if len(found) > 1:
        raise TypeError(f"{operation}: all arrays have to be of one dtype, not {' and '.join(found)}")
