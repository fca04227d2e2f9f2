"""Arrays of NumPy and CuPy on their way through the core.

The core takes arrays of CuPy too. This adapter gives it host memory all the same: it joins gradients in host
buffers, and writes results of NumPy. No other module here knows where arrays lie.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import chainer
from chainer.backends import cuda

__all__ = ["Array", "check_dtype", "check_same_dtype", "is_array", "on_device", "to_device", "to_host"]

Array = NDArray[Any]

_NAMES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
_DTYPES = {np.dtype(name) for name in _NAMES.split()}


def is_array(x: object) -> bool:
    """Whether `x` is an array, or a scalar, of NumPy or CuPy."""
    return isinstance(x, np.ndarray | np.generic | cuda.ndarray)


def on_device(x: object) -> bool:
    """Whether `x` is an array in a device's memory."""
    return isinstance(x, cuda.ndarray) and not isinstance(x, np.ndarray)


def to_host(x: Any) -> Array:
    """`x` in C order in host memory; itself where it is so already. Waits for the device's stream."""
    return np.asarray(cuda.to_cpu(x), order="C")


def to_device(x: Array, device: bool) -> Any:
    """`x` where its receiver wants it: on the current device, or in host memory."""
    return chainer.backends.cuda.cupy.asarray(x) if device else x


def check_dtype(operation: str, x: Any) -> None:
    """Raise TypeError unless `operation` can carry the dtype of `x`."""
    if np.dtype(x.dtype) not in _DTYPES:
        raise TypeError(
            f"{operation} does not support dtype {x.dtype}; send complex numbers as pairs of reals"
        )


def check_same_dtype(operation: str, dtypes: Iterable[Any]) -> None:
    """Raise TypeError if dtypes differ."""
    found = sorted({np.dtype(dtype).name for dtype in dtypes})
    if len(found) > 1:
        raise TypeError(f"{operation}: all arrays have to be of one dtype, not {' and '.join(found)}")
