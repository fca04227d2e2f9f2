"""Sparse gradients: only rows that some rank touched travel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["union_of_rows"]


def union_of_rows(
    comm: Communicator, rows: NDArray[np.int64], name: str
) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """Agree on the rows of a sparse gradient. Collective.

    The caller then puts its values at `positions` of an array of len(union) rows of zeros and reduces that:
    the sum has the same bits as that of dense gradients, which a concatenation of all values would not
    give.

    Args:
        comm: Ranks that take part.
        rows: This rank's row numbers, ascending and unique; may be empty. Shape (n,).
        name: Name of the parameter.

    Returns:
        The rows that any rank has, ascending, and the positions of `rows` among them. Shapes (m,) and (n,).
    """
    union = np.unique(comm.allgather(rows, name=f"rows of {name}"))
    return union, np.searchsorted(union, rows)
