"""The reduction of a model's gradients through TensorFlow's adapter, to be timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from multiring import Communicator
from multiring.tensorflow import GradientReduction

__all__ = ["Reduction", "make_reduction"]


class Reduction:
    """Gradients that a traced function computes and reduces, as a training step does."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], comm: Communicator) -> None:
        self._shapes = [tuple(shape) for shape in shapes]
        variables = [tf.Variable(tf.zeros(shape), name=f"weight {k}") for k, shape in enumerate(self._shapes)]
        self._reduction = GradientReduction(variables, comm)
        del variables
        self._step = tf.function(self._trace, autograph=False, jit_compile=False)
        self._begin: Callable[[], None] = lambda: None
        self._gradients: list[Any] = []

    def _trace(self, values: Any) -> list[Any]:
        # A value for each, lest gradients of the same shape become one.
        gradients = [
            tf.fill(shape, value) for shape, value in zip(self._shapes, tf.unstack(values), strict=True)
        ]
        with tf.control_dependencies(gradients):
            begun = tf.py_function(lambda: self._begin(), [], [])
        with tf.control_dependencies([begun]):
            reduced: list[Any] = self._reduction.reduce(gradients)
        return reduced

    def run(self, value: float, begin: Callable[[], None]) -> None:
        """Fresh gradients full of `value`, averaged over the ranks."""
        self._begin = begin
        self._gradients = []
        self._gradients = self._step(tf.fill([len(self._shapes)], value))

    def check(self, value: float) -> bool:
        """Whether all gradients hold `value`."""
        return all(bool(tf.reduce_all(gradient == value)) for gradient in self._gradients)

    def close(self) -> None:
        """Let go of the gradients."""
        self._gradients = []


def make_reduction(shapes: Sequence[tuple[int, ...]], comm: Communicator) -> Reduction:
    """A reduction of float32 gradients of these shapes. Collective."""
    return Reduction(shapes, comm)
