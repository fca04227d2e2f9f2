"""What the collectives have to give, computed with NumPy on one process from the inputs of all ranks.

Values are NumPy arrays; those of dtype "bfloat16", for which NumPy has no name, are held as the uint16 of
their bits, so the functions are told the dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
Bits = npt.NDArray[Any]
_PARTS = {"complex64": "float32", "complex128": "float64"}


def random_bits(seed: int, shape: Sequence[int], dtype: str) -> Bits:
    """Values of the magnitudes of gradients, zeros and negative ones included; integers of all sizes."""
    generator = np.random.default_rng(seed)
    if dtype == "bool":
        return generator.integers(0, 2, shape).astype(bool)
    if dtype in ("float16", "bfloat16", "float32", "float64"):
        exponents = generator.integers(-6, 7, shape).astype(np.float64)
        values = generator.standard_normal(shape) * 2.0**exponents * (generator.random(shape) > 0.05)
        values += 0.0  # no negative zeros: which of two zeros is the lesser is not defined
        return narrowed(values.astype(np.float32), dtype) if dtype != "float64" else values
    if dtype in _PARTS:
        return random_bits(seed, (*shape[:-1], 2 * shape[-1]), _PARTS[dtype]).view(dtype)
    info = np.iinfo(dtype)
    return generator.integers(info.min, info.max, shape, dtype, endpoint=True)


def widened(bits: Bits, dtype: str) -> Bits:
    """Values in the type in which they are reduced: float32 for the half types."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.astype(np.float32) if dtype == "float16" else bits


def narrowed(values: Bits, dtype: str) -> Bits:
    """The inverse of `widened`, rounding to nearest even."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    word = np.asarray(values, np.float32).view(np.uint32)
    return ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).astype(np.uint16)


@dataclass(frozen=True)
class Reduction:
    """One way to reduce."""

    op: str = "sum"
    prescale: float = 1.0
    postscale: float = 1.0

    def apply(self, inputs: Sequence[Bits], dtype: str) -> Bits:
        """The canonical reduction of the inputs of ranks 0, 1, ...; scales and averages of floats only."""
        leaves = [_scaled(widened(bits, dtype), self.prescale) for bits in inputs]
        result = _tree(leaves, _combine(self.op, dtype))
        if self.op == "average":
            result = _by_parts(np.divide, result, len(inputs))
        return narrowed(_scaled(result, self.postscale), dtype)


def _tree(values: Sequence[Bits], combine: Callable[[Bits, Bits], Bits]) -> Bits:
    if len(values) == 1:
        return values[0]
    left = 1
    while left * 2 < len(values):
        left *= 2
    return combine(_tree(values[:left], combine), _tree(values[left:], combine))


def _combine(op: str, dtype: str) -> Callable[[Bits, Bits], Bits]:
    if op.startswith("bitwise"):
        return getattr(np, op)
    if dtype == "bool":
        return np.logical_or if op in ("sum", "max") else np.logical_and
    if op == "product" and dtype in _PARTS:
        return _complex_product
    return {
        "sum": np.add,
        "average": np.add,
        "product": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
    }[op]


def _scaled(values: Bits, factor: float) -> Bits:
    return values if factor == 1.0 else _by_parts(np.multiply, values, factor)


def _by_parts(operation: Callable[[Bits, Any], Bits], values: Bits, number: float) -> Bits:
    """The operation of NumPy on real numbers; the parts of complex ones each by itself."""
    parts = values.view(_PARTS.get(values.dtype.name, values.dtype))
    return operation(parts, parts.dtype.type(number)).view(values.dtype)


def _complex_product(a: Bits, b: Bits) -> Bits:
    """Each operation rounded by itself, which those of NumPy may not be."""
    result = np.empty_like(a)
    result.real = a.real * b.real - a.imag * b.imag
    result.imag = a.real * b.imag + a.imag * b.real
    return result
