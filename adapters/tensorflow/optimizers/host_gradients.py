"""Gradients of Keras on a backend other than TensorFlow: reduced by way of host memory."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import ml_dtypes  # noqa: F401  # comes with Keras; makes NumPy know bfloat16 by name
import numpy as np
from numpy.typing import NDArray

from multiring.derived import derived
from multiring.errors import UsageError
from multiring.gradients.bucketing import ParameterSpec
from multiring.gradients.options import ReducerOptions
from multiring.gradients.reducer import GradientReducer
from multiring.gradients.refusals import check_gradient
from multiring.gradients.source import IN_SLOT, Gradient, GradientSource
from multiring.state.check import StateCheck
from multiring.tensorflow.variables import describe_variables, named_variables

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["HostReduction"]

Tensor = Any
Array = NDArray[Any]


class HostReduction(GradientSource):
    """Reduces the gradients of a fixed list of variables through the shared reducer. Creation is collective.

    Arrays of any backend are copied to the reducer's buckets and the results back. Inside a function that JAX
    compiles, this happens in a callback that keeps its place among others of its kind.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        comm: Communicator,
        options: ReducerOptions,
        state: Callable[[], Any] = list,
    ) -> None:
        """Compare the variables over ranks and allocate the buckets.

        Args:
            variables: What is trained.
            comm: Ranks that train together.
            options: How to reduce.
            state: Gives variables of the optimizer, to be compared over ranks together with `variables`.

        Raises:
            UsageError: No variables, names that repeat, a dtype that cannot be reduced.
            MismatchError: The ranks have different variables or options.
        """
        described = describe_variables(variables)
        specs = [ParameterSpec(name, shape, dtype) for name, shape, dtype in described]
        self._reducer = GradientReducer(comm, specs, options, self)
        self._rank = comm.rank
        self._published: set[int] = set()
        # Checks run between steps, so that they need only keep the order of the steps.
        self._check = StateCheck(derived(comm, "state of Keras"), options.check_every)
        self._variables, self._state = [weakref.ref(variable) for variable in variables], state

    def reduce(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradients reduced over ranks, in the same order; None where no rank has one. Collective.

        Within a function that JAX compiles, what is None stays None.

        Raises:
            UsageError: Their number is not that of the variables.
            MultiringError: The communication failed.
        """
        if len(gradients) != len(self._reducer.specs):
            raise UsageError(
                f"{len(gradients)} gradients were given for {len(self._reducer.specs)} variables"
            )
        jax = sys.modules.get("jax")  # loaded, or Keras would not compute with it
        present = [k for k, gradient in enumerate(gradients) if gradient is not None]
        if jax is not None and any(isinstance(gradients[k], jax.core.Tracer) for k in present):
            return self._reduce_in_callback(jax, gradients, present)
        if self._check.due():
            self._check.compare(self._entries())
        found = self._exchange([None if g is None else _to_numpy(g) for g in gradients])
        return [
            None if value is None else keras.ops.convert_to_tensor(value, dtype=value.dtype.name)
            for value in found
        ]

    def _entries(self) -> Iterator[tuple[str, Array]]:
        alive = [variable for variable in (ref() for ref in self._variables) if variable is not None]
        for kind, variables in (("optimizer variable", self._state()), ("parameter", alive)):
            for name, variable in named_variables(variables).items():
                yield f"{kind} '{name}'", _to_numpy(variable)

    def fetch(self, index: int) -> Gradient | None:
        """Part of `GradientSource`: what this rank has was put into its slot before."""
        return IN_SLOT if self._reducer.is_ready(index) else None

    def publish(self, index: int) -> None:
        """Part of `GradientSource`: another rank had a gradient that this rank had not."""
        self._published.add(index)

    def _exchange(self, arrays: Sequence[Array | None]) -> list[Array | None]:
        reducer = self._reducer
        self._published = {k for k, array in enumerate(arrays) if array is not None}
        for index in self._published:
            check_gradient(self._rank, reducer.specs[index], arrays[index])
        for index in reversed(range(len(arrays))):  # gradients arrive last layer first
            array = arrays[index]
            if array is not None:
                reducer.views[index][...] = array
                reducer.mark_ready(index)
        reducer.finish()
        return [view.copy() if k in self._published else None for k, view in enumerate(reducer.views)]

    def _reduce_in_callback(self, jax: Any, gradients: Sequence[Tensor], present: list[int]) -> list[Tensor]:
        def exchange(*values: Any) -> list[Array]:
            arrays: list[Array | None] = [None] * len(gradients)
            for index, value in zip(present, values, strict=True):
                arrays[index] = np.asarray(value)
            found = self._exchange(arrays)
            return [np.asarray(found[index]) for index in present]

        own = [gradients[index] for index in present]
        shapes = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in own]
        results: list[Tensor] = [None] * len(gradients)
        reduced = jax.experimental.io_callback(exchange, shapes, *own, ordered=True)
        for index, value in zip(present, reduced, strict=True):
            results[index] = value
        return results


def _to_numpy(gradient: Tensor) -> Array:
    return np.asarray(keras.ops.convert_to_numpy(gradient))
