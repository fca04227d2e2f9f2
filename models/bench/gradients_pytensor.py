"""The gradients of a PyTensor model, reduced inside a compiled function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytensor
from pytensor.compile.mode import Mode
from pytensor.link.vm import VMLinker

import multiring.pytensor
from multiring import Communicator

__all__ = ["Reduction", "make_reduction"]


class Reduction:
    """A function that takes gradients from ordinary memory and does nothing but reduce them.

    They are the function's own to write to, as those that it computes itself are.

    Args:
        shapes: Of the parameters, first layer first.
        comm: The ranks.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], comm: Communicator) -> None:
        self._written = [
            pytensor.shared(np.zeros(shape, np.float32), name=f"gradient{index}", shape=shape)
            for index, shape in enumerate(shapes)
        ]
        self._gradients = multiring.pytensor.DistributedGradients(self._written, comm)
        reduced = self._gradients.reduce(self._written).gradients
        # The function has no arithmetic that a C compiler could speed up.
        mode = Mode(VMLinker(use_cloop=True, c_thunks=False), "fast_run")
        updates = list(zip(self._written, reduced, strict=True))
        self._function: Any = pytensor.function([], updates=updates, mode=mode)

    def run(self, value: float, begin: Callable[[], None]) -> None:
        """Write gradients full of `value`; call the function."""
        for variable in self._written:
            variable.get_value(borrow=True)[...] = value
        begin()
        self._function()

    def check(self, value: float) -> bool:
        """Whether every gradient is full of `value`."""
        found = (variable.get_value(borrow=True) for variable in self._written)
        return all(bool((gradient == value).all()) for gradient in found)

    def close(self) -> None:
        """Release the buckets."""
        self._gradients.close()


def make_reduction(shapes: Sequence[tuple[int, ...]], comm: Communicator) -> Reduction:
    """Gradients of these shapes, float32, and what reduces them. Collective."""
    return Reduction(shapes, comm)
