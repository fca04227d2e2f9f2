"""Gradients of the Caffe-style solver's blobs, reduced through the solver callback."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import torch

import multiring.caffe
from multiring import Communicator
from multiring.models.caffe import Blob

__all__ = ["Reduction", "make_reduction"]


class _Net:
    """Learned blobs without layers between them."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.params = OrderedDict(
            (f"layer{number}", [Blob(shape, torch.float32)]) for number, shape in enumerate(shapes)
        )


class _Solver:
    def __init__(self, net: _Net) -> None:
        self.net, self.iter = net, 0

    def add_callback(self, on_start: Callable[[], None], on_gradients_ready: Callable[[], None]) -> None:
        """The benchmark calls them itself."""


class Reduction:
    """One model's gradients."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], comm: Communicator) -> None:
        self._net = _Net(shapes)
        self._callback = multiring.caffe.SolverCallback(_Solver(self._net), comm)
        self._callback.on_start()

    def run(self, value: float, begin: Callable[[], None]) -> None:
        """Fill all gradients; average them over the ranks."""
        for blobs in self._net.params.values():
            blobs[0].gradient.fill_(value)
        begin()
        self._callback.on_gradients_ready()

    def check(self, value: float) -> bool:
        """Whether all gradients hold a value."""
        return all(bool(np.all(blobs[0].diff == value)) for blobs in self._net.params.values())

    def close(self) -> None:
        """Release the buckets."""
        self._callback.close()


def make_reduction(shapes: Sequence[tuple[int, ...]], comm: Communicator) -> Reduction:
    """The reduction that `multiring bench gradients --framework caffe` measures. Collective.

    Args:
        shapes: Shapes of the float32 gradients.
        comm: The ranks.
    """
    return Reduction(shapes, comm)
