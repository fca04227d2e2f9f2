"""Mean and variance over the batches of all ranks, from those of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from multiring import _core as native
from multiring.errors import UsageError

__all__ = ["cannot_synchronise", "combine_moments", "fold_rows", "moments_row"]

Row = NDArray[np.float64]
T = TypeVar("T")


def moments_row(count: int, mean: NDArray[np.float64], variance: NDArray[np.float64]) -> Row:
    """What a rank sends of its batch: count, means, sums of squared deviations. Shape (1, 2*channels + 1).

    Args:
        count: Values per channel; with 0 the others are not looked at.
        mean: Shape (channels,).
        variance: Biased, shape (channels,).
    """
    row = np.zeros((1, 2 * mean.size + 1))
    if count:
        row[0, 0] = count
        row[0, 1 : mean.size + 1] = mean
        row[0, mean.size + 1 :] = variance * count
    return row


def combine_moments(rows: NDArray[np.float64]) -> tuple[float, Row, Row]:
    """Count, mean and biased variance of all rows together.

    Rows are folded in a balanced tree over the ranks (Chan, Golub, LeVeque 1979), which loses no digits where
    the mean is large, and gives the same bits on every rank.

    Args:
        rows: Those of all ranks, in their order. Shape (ranks, 2*channels + 1).

    Returns:
        The count, and mean and variance of shape (channels,); zeros where the count is 0.
    """
    with native.StandardFloatMode():  # a rank's program may have set another one
        total: Row = fold_rows(rows, _merged)
        channels = (len(total) - 1) // 2
        return float(total[0]), total[1 : channels + 1], total[channels + 1 :] / max(float(total[0]), 1.0)


def fold_rows(rows: Any, merge: Callable[[T, T], T]) -> T:
    """One row of those of all ranks, in a balanced tree over the ranks: the order of additions of the core.

    Args:
        rows: A sequence, or an array of any framework with the ranks along its first axis.
        merge: Makes one row of two.
    """
    if len(rows) == 1:
        first: T = rows[0]
        return first
    half = 1 << ((len(rows) - 1).bit_length() - 1)
    return merge(fold_rows(rows[:half], merge), fold_rows(rows[half:], merge))


def _merged(left: Row, right: Row) -> Row:
    if left[0] == 0 or right[0] == 0:
        return right if left[0] == 0 else left
    channels = (len(left) - 1) // 2
    count = left[0] + right[0]
    difference = right[1 : channels + 1] - left[1 : channels + 1]
    mean = left[1 : channels + 1] + difference * (right[0] / count)
    squares = left[channels + 1 :] + right[channels + 1 :] + difference**2 * (left[0] * right[0] / count)
    folded: Row = np.concatenate([[count], mean, squares])
    return folded


def cannot_synchronise(layer: object, path: str, synchronised: str) -> UsageError:
    """Return the error of a layer that normalises batches and computes something besides.

    Args:
        layer: The layer of the framework.
        path: Where the model has it; empty for a layer alone.
        synchronised: The class of layers that take its place.
    """
    place = f"'{path}'" if path else "the layer"
    return UsageError(
        f"{place} is a {type(layer).__name__}, which computes something besides its batch normalisation, and "
        "conversion would leave that out in silence: convert the model before such layers are changed, or "
        f"derive their class from {synchronised}"
    )
