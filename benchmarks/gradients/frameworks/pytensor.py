"""The gradients of a PyTensor model, reduced inside a compiled function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Apply
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.link.vm import VMLinker

import multiring.pytensor
from multiring import Communicator

__all__ = ["Reduction", "make_reduction"]


class _Written(Op):
    """Computes nothing: its outputs are arrays that have been written before."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self._shapes = shapes
        self.arrays: list[NDArray[Any]] = []

    def make_node(self) -> Apply:
        """No inputs; an output for each array."""
        return Apply(self, [], [pt.tensor(dtype="float32", shape=shape) for shape in self._shapes])

    def do_constant_folding(self, fgraph: FunctionGraph, node: Apply) -> bool:
        """Never: the arrays are others in each call."""
        return False

    def perform(self, node: Apply, inputs: Sequence[Any], output_storage: Sequence[list[Any]]) -> None:
        """Give the arrays away."""
        for storage, array in zip(output_storage, self.arrays, strict=True):
            storage[0] = array
        self.arrays = []


class Reduction:
    """A function that has gradients in memory of its own and does nothing but reduce them.

    Its results are not copied on the way out, as they are not where updates read them.

    Args:
        shapes: Of the parameters, first layer first.
        comm: The ranks.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], comm: Communicator) -> None:
        self._shapes, self._written = shapes, _Written(shapes)
        weights = [
            pytensor.shared(np.zeros(shape, np.float32), name=f"weight{index}")
            for index, shape in enumerate(shapes)
        ]
        self._gradients = multiring.pytensor.DistributedGradients(weights, comm)
        reduced = self._gradients.reduce(self._written(return_list=True)).gradients
        outputs = [pytensor.Out(gradient, borrow=True) for gradient in reduced]
        # The function has no arithmetic that a C compiler could speed up.
        mode = Mode(VMLinker(use_cloop=True, c_thunks=False), "fast_run")
        self._function: Any = pytensor.function([], outputs, mode=mode)
        self._found: list[NDArray[Any]] = []

    def run(self, value: float, begin: Callable[[], None]) -> None:
        """Write gradients full of `value`; call the function."""
        self._found = []
        self._written.arrays = [np.full(shape, value, np.float32) for shape in self._shapes]
        begin()
        self._found = self._function()

    def check(self, value: float) -> bool:
        """Whether every gradient is full of `value`."""
        return all(bool((found == value).all()) for found in self._found)

    def close(self) -> None:
        """Release the buckets."""
        self._found = []
        self._gradients.close()


def make_reduction(shapes: Sequence[tuple[int, ...]], comm: Communicator) -> Reduction:
    """Gradients of these shapes, float32, and what reduces them. Collective."""
    return Reduction(shapes, comm)
