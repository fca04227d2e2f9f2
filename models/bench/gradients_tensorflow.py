"""The reduction of a model's gradients through TensorFlow's adapter, to be timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from multiring import Communicator
from multiring.tensorflow import GradientReduction

__all__ = ["Reduction", "make_reduction"]


class Reduction:
    """Gradients in TensorFlow's own memory, reduced in a traced function as a training step does it."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], comm: Communicator) -> None:
        self._shapes = [tuple(shape) for shape in shapes]
        variables = [tf.Variable(tf.zeros(shape), name=f"weight {k}") for k, shape in enumerate(self._shapes)]
        reduction = GradientReduction(variables, comm)
        del variables
        self._reduce = tf.function(reduction.reduce, autograph=False, jit_compile=False)
        self._gradients: list[Any] = []

    def write(self, value: float) -> None:
        """Fresh gradients, all of which hold `value`."""
        self._gradients = [tf.fill(shape, value) for shape in self._shapes]

    def reduce(self) -> None:
        """Average over ranks; returns when the results can be used."""
        self._gradients = self._reduce(self._gradients)

    def check(self, value: float) -> bool:
        """Whether all gradients hold `value`."""
        return all(bool(tf.reduce_all(gradient == value)) for gradient in self._gradients)

    def close(self) -> None:
        """Let go of the gradients."""
        self._gradients = []


def make_reduction(shapes: Sequence[tuple[int, ...]], comm: Communicator) -> Reduction:
    """A reduction of float32 gradients of these shapes. Collective."""
    return Reduction(shapes, comm)
