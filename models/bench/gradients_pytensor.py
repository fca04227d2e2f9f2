"""The gradients of a PyTensor model, reduced inside a compiled function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytensor
from numpy.typing import NDArray
from pytensor.compile.mode import Mode
from pytensor.link.vm import VMLinker

import multiring.pytensor
from multiring import Communicator

__all__ = ["Reduction", "make_reduction"]


class Reduction:
    """A function that takes gradients from ordinary memory and does nothing but reduce them.

    Its results are not copied on the way out, as they are not where updates read them.

    Args:
        shapes: Of the parameters, first layer first.
        comm: The ranks.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], comm: Communicator) -> None:
        self._written = [
            pytensor.shared(np.zeros(shape, np.float32), name=f"weight{index}")
            for index, shape in enumerate(shapes)
        ]
        self._gradients = multiring.pytensor.DistributedGradients(self._written, comm)
        reduced = self._gradients.reduce(self._written).gradients
        outputs = [pytensor.Out(gradient, borrow=True) for gradient in reduced]
        # The function has no arithmetic that a C compiler could speed up.
        mode = Mode(VMLinker(use_cloop=True, c_thunks=False), "fast_compile")
        self._function: Any = pytensor.function([], outputs, mode=mode)
        self._found: list[NDArray[Any]] = []

    def run(self, value: float, begin: Callable[[], None]) -> None:
        """Write gradients full of `value`; call the function."""
        for variable in self._written:
            variable.get_value(borrow=True)[...] = value
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
