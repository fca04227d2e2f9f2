"""Gradients of one rank in NumPy, for the shared reducer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from numpy.typing import NDArray

from multiring import Communicator
from multiring.gradients.bucketing import ParameterSpec
from multiring.gradients.options import ReducerOptions
from multiring.gradients.reducer import GradientReducer
from multiring.gradients.source import IN_SLOT, Gradient, GradientSource, RoundResult

Values = NDArray[Any]


class Source(GradientSource):
    """Gradients of one rank by parameter: those of `elsewhere` in arrays of their own, others in slots."""

    def __init__(self, comm: Communicator, specs: list[ParameterSpec], options: ReducerOptions) -> None:
        self.reducer = GradientReducer(comm, specs, options, self)
        self.begin({})

    def begin(self, gradients: Mapping[int, Values], elsewhere: Collection[int] = ()) -> None:
        self.gradients, self.elsewhere = dict(gradients), elsewhere
        self.arrays: dict[int, Values] = {}
        self.published: list[int] = []

    def reduce(self, gradients: Mapping[int, Values]) -> RoundResult:
        self.begin(gradients)
        for index in gradients:
            self.reducer.mark_ready(index)
        return self.reducer.finish()

    def read(self, index: int) -> Values:
        if index in self.arrays:
            return self.arrays[index]
        found: Values = self.reducer.slot(index).view(self.reducer.specs[index].dtype)
        return found

    def fetch(self, index: int) -> Gradient | None:
        if index not in self.gradients:
            return None
        if index not in self.elsewhere:
            self.read(index)[:] = self.gradients[index]
            return IN_SLOT
        array = self.arrays[index] = self.gradients[index].copy()
        return Gradient(array.ctypes.data, array)

    def publish(self, index: int) -> None:
        self.published.append(index)
