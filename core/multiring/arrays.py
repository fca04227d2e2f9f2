"""Arrays of any library, told apart by protocol: no framework is imported or named here."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np

from multiring import _core
from multiring.types import Array

__all__ = ["as_array", "contiguous", "copy_into", "empty_like", "like"]


def _library(x: Array) -> ModuleType | None:
    """The top-level module that an array's type comes from, which is imported if the array exists."""
    return sys.modules.get(type(x).__module__.partition(".")[0])


def as_array(x: Any) -> Array:
    """Python numbers and sequences as NumPy arrays; arrays as they are."""
    return np.asarray(x) if isinstance(x, bool | int | float | list | tuple) else x


def contiguous(x: Array) -> Array:
    """`x` itself if its elements lie in C order, else a copy that does."""
    if isinstance(x, np.ndarray | np.generic):
        return x if x.flags.c_contiguous else np.ascontiguousarray(x)
    if hasattr(x, "is_contiguous"):
        return x if x.is_contiguous() else x.contiguous()
    if isinstance(x, memoryview):
        return x if x.c_contiguous else np.ascontiguousarray(x)
    return x


def empty_like(x: Array) -> Array:
    """A new C-ordered array of the kind, shape and dtype of the C-ordered `x`; NumPy for kinds that make none."""
    if isinstance(x, np.ndarray | np.generic):
        return np.empty(x.shape, x.dtype)
    make = getattr(_library(x), "empty_like", None)
    if make is not None:
        return make(x)
    return np.empty_like(np.asarray(x))


def copy_into(out: Array, x: Array) -> None:
    """Copies `x` into the (perhaps strided) `out` of the same shape."""
    out[...] = x


def like(x: Array, result: _core.Result) -> Array:
    """The memory of `result` as an array of the kind of `x`, without a copy."""
    if not isinstance(x, np.ndarray | np.generic):
        take = getattr(_library(x), "from_dlpack", None)
        if take is not None:
            return take(result)
    array = result.numpy()
    # Where an extension dtype such as bfloat16 came in, NumPy itself has no name for it.
    dtype = getattr(x, "dtype", None)
    return array.view(dtype) if result.dtype == "bfloat16" and isinstance(dtype, np.dtype) else array
