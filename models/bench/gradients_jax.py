"""What it costs to average gradients in JAX: a compiled function that does nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import multiring.jax
from multiring import Communicator

__all__ = ["Reduction", "make_reduction"]


class Reduction:
    """Gradients in JAX's memory, averaged by `multiring.jax.average_gradients`.

    Args:
        shapes: Of the gradients, in the order of the layers.
        comm: Ranks that take part.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], comm: Communicator) -> None:
        self._fill = jax.jit(lambda value: [jnp.full(shape, value, jnp.float32) for shape in shapes])
        # Donated, as a training step uses its gradients up: they are reduced where they lie.
        self._average = jax.jit(
            lambda gradients: multiring.jax.average_gradients(gradients, comm=comm), donate_argnums=0
        )
        self._gradients: list[jax.Array] = []

    def write(self, value: float) -> None:
        """Fresh gradients that hold `value`."""
        self._gradients = []
        self._gradients = self._ready(self._fill(np.float32(value)))

    def reduce(self) -> None:
        """Average them over the ranks; returns when they can be used."""
        self._gradients = self._ready(self._average(self._gradients))

    @staticmethod
    def _ready(arrays: list[jax.Array]) -> list[jax.Array]:
        return [array.block_until_ready() for array in arrays]

    def check(self, value: float) -> bool:
        """Whether all gradients hold `value`."""
        return all(bool((np.asarray(gradient) == value).all()) for gradient in self._gradients)

    def close(self) -> None:
        """Let go of the gradients."""
        self._gradients = []


def make_reduction(shapes: Sequence[tuple[int, ...]], comm: Communicator) -> Reduction:
    """Gradients of these shapes to be averaged; the same on every rank."""
    return Reduction(shapes, comm)
