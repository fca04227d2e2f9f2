"""The gradients of a Chainer model, reduced by the Chainer adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import multiring.chainer  # isort: skip  # before chainer, which it makes importable

import chainer
import numpy as np

from multiring import Communicator

__all__ = ["Reduction", "make_reduction"]


class Reduction:
    """Gradients as a backward pass leaves them, averaged by `multi_node_mean_grad`.

    Args:
        shapes: Of the parameters.
        comm: The ranks.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], comm: Communicator) -> None:
        self._communicator = multiring.chainer.create_communicator(comm)
        self._link = chainer.Link()
        with self._link.init_scope():
            for index, shape in enumerate(shapes):
                # Numbers of one width: parameters are reduced in the order of their names.
                setattr(self._link, f"W{index:04}", chainer.Parameter(np.zeros(shape, np.float32)))
        self._parameters = list(self._link.params())

    def run(self, value: float, begin: Callable[[], None]) -> None:
        """Give every parameter a gradient full of `value`, in memory of its own; average."""
        for parameter in self._parameters:
            parameter.grad = np.full(parameter.shape, value, np.float32)
        begin()
        self._communicator.multi_node_mean_grad(self._link)

    def check(self, value: float) -> bool:
        """Whether every gradient is full of `value`."""
        return all(bool((parameter.grad == value).all()) for parameter in self._parameters)

    def close(self) -> None:
        """Release the buckets."""
        self._communicator.finalize()


def make_reduction(shapes: Sequence[tuple[int, ...]], comm: Communicator) -> Reduction:
    """Parameters of these shapes, float32, and what reduces their gradients. Collective."""
    return Reduction(shapes, comm)
