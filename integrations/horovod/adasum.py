"""Adasum: sums in which what two gradients agree on counts once (Maleki et al. 2020)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["adasum"]

Array = NDArray[np.float64]


def adasum(rows: NDArray[Any]) -> Array:
    """The combination of all rows, pairwise: neighbours first, then neighbouring pairs.

    Args:
        rows: Shape (ranks, elements), a power of two of ranks.

    Returns:
        Shape (elements,), float64, alike on every rank.
    """
    parts: list[Array] = list(rows.astype(np.float64))
    while len(parts) > 1:
        parts = [_pair(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _pair(a: Array, b: Array) -> Array:
    dot = float(a @ b)
    return _factor(dot, float(a @ a)) * a + _factor(dot, float(b @ b)) * b


def _factor(dot: float, square: float) -> float:
    return 1 - dot / (2 * square) if square > 0 else 1.0
