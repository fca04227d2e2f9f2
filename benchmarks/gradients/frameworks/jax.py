"""What it costs to average gradients in JAX: a compiled function that does nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

    def run(self, value: float, begin: Callable[[], None]) -> None:
        """Fresh gradients full of `value`, averaged over the ranks."""
        self._gradients = []
        self._gradients = self._fill(np.float32(value))
        jax.block_until_ready(self._gradients)
        begin()
        self._gradients = self._average(self._gradients)
        jax.block_until_ready(self._gradients)

    def check(self, value: float) -> bool:
        """Whether all gradients hold `value`."""
        return all(bool((np.asarray(gradient) == value).all()) for gradient in self._gradients)

    def close(self) -> None:
        """Let go of the gradients."""
        self._gradients = []


def make_reduction(shapes: Sequence[tuple[int, ...]], comm: Communicator) -> Reduction:
    """Gradients of these shapes to be averaged; the same on every rank."""
    return Reduction(shapes, comm)
