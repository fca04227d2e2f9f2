"""Sparse gradients: only rows that some rank has touched travel.

Two asynchronous steps, because the second needs the result of the first: the row numbers of all ranks are
gathered, then every rank puts its values at the places of its rows among all of them, with zeros elsewhere,
and these are reduced. So the sum has the same bits as that of dense gradients, which adding up a
concatenation of all values would not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from multiring.arrays import multiply
from multiring.gradients.options import ReducerOptions

if TYPE_CHECKING:
    from multiring.communicator import Communicator
    from multiring.work import Work

__all__ = ["SparseReduction"]

Rows = NDArray[np.int64]


class SparseReduction:
    """One sparse gradient on its way over the ranks. Every step is collective."""

    def __init__(
        self,
        comm: Communicator,
        rows: Rows,
        scatter: Callable[[int, NDArray[np.intp]], Any],
        name: str,
        options: ReducerOptions,
    ) -> None:
        """Send the rows.

        Args:
            comm: Ranks that train together.
            rows: This rank's row numbers, ascending and unique; may be empty. Shape (n,).
            scatter: Called with a number of rows and positions of shape (n,), makes a contiguous array of
                so many rows that has this rank's values at the positions and zeros elsewhere.
            name: Name of the parameter.
            options: How to reduce.
        """
        self._comm, self._rows, self._scatter = comm, rows, scatter
        self._name, self._options = name, options
        self._gathering: Work = comm.allgather_async(rows, name=f"rows of {name}")
        self._reducing: Work | None = None
        self._union: Rows = rows
        self._values: Any = None

    def send_values(self) -> None:
        """Wait for the rows of all ranks and send the values. Does nothing the second time."""
        if self._values is not None:
            return
        self._union = np.unique(self._gathering.wait())
        self._values = self._scatter(len(self._union), np.searchsorted(self._union, self._rows))
        if len(self._union):
            narrow = str(self._values.dtype).endswith("float32")  # NumPy's or the framework's name
            self._reducing = self._comm.allreduce_async(
                self._values,
                op=self._options.op,
                out=self._values,
                name=f"values of {self._name}",
                prescale=self._options.prescale,
                postscale=self._options.postscale,
                **self._options.crossing(narrow),
            )

    def wait(self, active: int) -> tuple[Rows, Any]:
        """The rows of all ranks, ascending, and their reduced values.

        Args:
            active: Number of ranks that have data, which averages divide by.
        """
        self.send_values()
        if self._reducing is not None:
            self._reducing.wait()
        if self._options.op == "average" and 0 < active < self._comm.size:
            multiply(self._values, self._comm.size / active)  # the core divided by the number of all ranks
        return self._union, self._values
