"""Kinds of arrays, registered once: the tests loop over `KINDS`, and a new kind is one more entry here.

A kind makes an array from the bits that `oracle` deals in, and takes the bits out of an array again.
"""

from __future__ import annotations

import array
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.python.collectives.oracle import DTYPES, Bits

_NUMPY_DTYPES = tuple(dtype for dtype in DTYPES if dtype != "bfloat16")


@dataclass(frozen=True)
class ArrayKind:
    """A kind of array: its name, what makes one from bits (C order, at least one-dimensional) of a dtype, the
    dtypes that it can hold, the type of results, whether it can be an `out`, and whether it has one dimension
    only."""

    name: str
    make: Callable[[Bits, str], Any]
    dtypes: tuple[str, ...] = _NUMPY_DTYPES
    result: str = "numpy.ndarray"
    writable: bool = True
    flat: bool = False


def bits_of(x: Any) -> Bits:
    """The bits of any array, as `oracle` holds them."""
    if hasattr(x, "detach"):
        torch = importlib.import_module("torch")
        is_bfloat16 = x.dtype == torch.bfloat16
        x = x.detach().cpu()
        return x.view(torch.int16).numpy().view(np.uint16) if is_bfloat16 else x.numpy()
    if hasattr(x, "get"):  # of a device
        x = x.get()
    bits = np.asarray(memoryview(x) if isinstance(x, bytes) else x)  # NumPy takes bytes for a text
    return bits.view(np.uint16) if bits.dtype.name == "bfloat16" else bits


def _strided(bits: Bits, _: str) -> Any:
    return np.repeat(bits, 3, -1)[..., 1::3]


def _read_only(bits: Bits, _: str) -> Any:
    copy = bits.copy()
    copy.flags.writeable = False
    return copy


def _tensor(bits: Bits, dtype: str) -> Any:
    torch = importlib.import_module("torch")
    if dtype == "bfloat16":
        return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(bits.copy())


def _strided_tensor(bits: Bits, dtype: str) -> Any:
    return _tensor(np.repeat(bits, 2, -1), dtype)[..., ::2]


def _parameter(bits: Bits, dtype: str) -> Any:
    torch = importlib.import_module("torch")
    return torch.nn.Parameter(_tensor(bits, dtype), requires_grad=False)


def _user_tensor(bits: Bits, dtype: str) -> Any:
    torch = importlib.import_module("torch")
    return _tensor(bits, dtype).as_subclass(type("Named", (torch.Tensor,), {"__module__": __name__}))


def _ml_dtypes(bits: Bits, _: str) -> Any:
    return bits.copy().view(importlib.import_module("ml_dtypes").bfloat16)


_TENSOR = {"dtypes": DTYPES, "result": "torch.Tensor"}
_FLAT = ("int8", "int32", "int64", "uint16", "float32", "float64")

KINDS = {
    kind.name: kind
    for kind in (
        ArrayKind("numpy", lambda bits, _: bits.copy()),
        ArrayKind("numpy strided", _strided),
        ArrayKind("numpy reversed", lambda bits, _: bits[::-1].copy()[::-1]),
        ArrayKind("numpy F order", lambda bits, _: np.array(bits, order="F")),
        ArrayKind("numpy read-only", _read_only, writable=False),
        ArrayKind("memoryview", lambda bits, _: memoryview(bits.copy())),
        ArrayKind("memoryview strided", lambda bits, dtype: memoryview(_strided(bits, dtype))),
        ArrayKind("bytearray", lambda bits, _: bytearray(bits), dtypes=("uint8",), flat=True),
        ArrayKind("bytes", lambda bits, _: bytes(bits), dtypes=("uint8",), writable=False, flat=True),
        ArrayKind("array.array", lambda x, _: array.array(x.dtype.char, x.tolist()), _FLAT, flat=True),
        ArrayKind("list", lambda bits, _: bits.tolist(), dtypes=("bool", "int64", "float64"), writable=False),
        ArrayKind("torch", _tensor, **_TENSOR),
        ArrayKind("torch strided", _strided_tensor, **_TENSOR),
        ArrayKind("torch parameter", _parameter, **_TENSOR),
        ArrayKind("torch subclass", _user_tensor, **_TENSOR),
        ArrayKind("ml_dtypes", _ml_dtypes, dtypes=("bfloat16",)),
    )
}


def is_result_of(kind: ArrayKind, x: Any) -> bool:
    """Whether `x` is of the type that results of the kind have."""
    return any(f"{base.__module__}.{base.__qualname__}" == kind.result for base in type(x).__mro__)


def assert_same_bits(found: Any, wanted: Bits) -> None:
    """Fails unless an array has the shape, the dtype and every bit of the oracle's."""
    bits = bits_of(found)
    assert bits.shape == wanted.shape, f"shape {bits.shape}, expected {wanted.shape}"
    assert bits.dtype == wanted.dtype, f"dtype {bits.dtype}, expected {wanted.dtype}"
    if bits.tobytes() != wanted.tobytes():
        np.testing.assert_array_equal(bits, wanted)
        raise AssertionError(f"equal values with different bits: {bits} and {wanted}")
