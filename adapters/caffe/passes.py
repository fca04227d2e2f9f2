"""The backward passes of an iteration, seen layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

from multiring.caffe.shape import Parameter

__all__ = ["BackwardPasses"]


class BackwardPasses:
    """Counts the passes of an iteration and knows which gradients each layer adds to.

    A pass runs from the last layer to the first, so a layer that is not below the one before it begins a new
    pass.

    Attributes:
        number: The pass under way, counted from 1; 0 before the first.
        expected: Passes of an iteration, None until that is known.
    """

    def __init__(self, parameters: Sequence[Parameter], expected: int | None) -> None:
        self.number, self.expected = 0, expected
        self._is_counting = expected is None
        self._last_layer = -1
        self._complete: dict[int, list[int]] = {}
        self._partial: dict[int, list[int]] = {}
        for index, parameter in enumerate(parameters):
            # A gradient is complete after the first layer that uses it, which is the last to run backward.
            first = min(parameter.users, default=-1)
            self._complete.setdefault(first, []).append(index)
            for layer in set(parameter.users) - {first}:
                self._partial.setdefault(layer, []).append(index)

    @property
    def is_last(self) -> bool:
        """Whether the pass under way is the iteration's last, as far as that is known."""
        return self.number == self.expected

    def begin(self) -> None:
        """An iteration begins."""
        self.number, self._last_layer = 0, -1

    def end(self) -> None:
        """An iteration's passes are over; the next is taken to have as many."""
        if self._is_counting and self.number:
            self.expected = self.number
        self.begin()

    def advance(self, layer: int) -> tuple[Sequence[int], Sequence[int]]:
        """A layer has run: blobs whose gradient it has completed, and blobs that it has only added to."""
        if layer >= self._last_layer:
            self.number += 1
        self._last_layer = layer
        return self._complete.get(layer, ()), self._partial.get(layer, ())
