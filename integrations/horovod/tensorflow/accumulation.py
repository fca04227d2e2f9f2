"""Gradients of several passes, added up on each rank before they are reduced and applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

__all__ = ["Accumulation", "accumulation_of"]

_DENSE = (
    "IndexedSlices are not supported when `backward_passes_per_step` > 1 and `sparse_as_dense` is False; "
    "pass sparse_as_dense=True"
)


class Accumulation:
    """Sums of gradients, as variables: in a function, in a graph and without one.

    Args:
        passes: Calls of `step` for each one that applies.
        averages: Whether sums are divided by `passes`.
        sparse_as_dense: Whether `tf.IndexedSlices` may be made dense.
    """

    def __init__(self, passes: int, averages: bool, sparse_as_dense: bool) -> None:
        if passes <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        self.passes, self._averages, self._sparse_as_dense = passes, averages, sparse_as_dense
        self._count: Any = None
        self._variables: list[Any] = []
        self._sums: list[Any] = []

    def step(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        apply: Callable[[list[Any]], Any],
        skip: Callable[[], Any] = lambda: tf.no_op(),
    ) -> Any:
        """Add gradients; at every `passes`-th call apply the sums and forget them.

        Args:
            gradients: Gradients of the same variables in each call.
            variables: Those variables.
            apply: Gets the sums.
            skip: Called in place of it in the other calls.

        Raises:
            ValueError: They are not the same variables as in the first call, or sparse.
        """
        if (
            any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
            and not self._sparse_as_dense
        ):
            raise ValueError(_DENSE)
        dense = [None if each is None else tf.convert_to_tensor(each) for each in gradients]
        if self._count is None:
            self._make(dense)
            self._variables = list(variables)
        self._require_same(dense, variables)
        added = [total.assign_add(each) for total, each in self._pairs(dense)]
        with tf.control_dependencies(_operations(added)):
            count = self._count.assign_add(1)

        def apply_now() -> Any:
            return self._apply(dense, apply)

        def skip_now() -> Any:
            with tf.control_dependencies(_operations([skip()])):
                return tf.constant(False)

        with tf.control_dependencies(_operations([count])):
            return tf.cond(tf.equal(self._count, self.passes), apply_now, skip_now)

    def values(self) -> list[Any] | None:
        """Return the sums of this rank, and how many passes are in them; None: there were no passes."""
        return None if self._count is None else [each.numpy() for each in self._all()]

    def restore(self, values: list[Any] | None) -> None:
        """Go back to what `values` has returned."""
        if self._count is None:
            return
        for variable, value in zip(self._all(), values or [0] * len(self._all()), strict=True):
            variable.assign(tf.broadcast_to(tf.cast(value, variable.dtype), variable.shape))

    def _all(self) -> list[Any]:
        return [self._count, *(total for total in self._sums if total is not None)]

    def _make(self, gradients: Sequence[Any]) -> None:
        with tf.init_scope():
            self._count = tf.Variable(0, trainable=False, name="backward_passes")
            self._sums = [
                None
                if each is None
                else tf.Variable(tf.zeros(each.shape, each.dtype), trainable=False, name="gradient_sum")
                for each in gradients
            ]

    def _pairs(self, gradients: Sequence[Any]) -> list[tuple[Any, Any]]:
        pairs = zip(self._sums, gradients, strict=True)
        return [(total, each) for total, each in pairs if each is not None]

    def _require_same(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Raise ValueError unless the same variables have gradients as in the first call."""
        first = {id(v): v for v, total in zip(self._variables, self._sums, strict=True) if total is not None}
        now = {id(v): v for v, each in zip(variables, gradients, strict=True) if each is not None}
        differing = [v for key, v in {**first, **now}.items() if (key in first) != (key in now)]
        if differing or [id(v) for v in variables] != [id(v) for v in self._variables]:
            name = getattr((differing or variables)[0], "name", "?")
            raise ValueError(
                f"backward_passes_per_step adds up the gradients of the same variables in each pass, but "
                f"variable '{name}' has a gradient in one pass and none, or another place, in another: pass "
                "all variables each time, in one order, or wrap an optimizer for each set of them"
            )

    def _apply(self, gradients: Sequence[Any], apply: Callable[[list[Any]], Any]) -> Any:
        divisor = self.passes if self._averages else 1
        means = [None if total is None else total.read_value() / divisor for total in self._sums]
        # First, for `apply` may raise: what was added up is lost then, as a gradient is without passes.
        with tf.control_dependencies(_operations(means)):
            zeroed = [total.assign(tf.zeros_like(total)) for total, _ in self._pairs(gradients)]
            zeroed.append(self._count.assign(0))
        with tf.control_dependencies(_operations(zeroed)):
            applied = apply(means)
        with tf.control_dependencies(_operations([applied])):
            return tf.constant(True)


def accumulation_of(optimizer: Any) -> Accumulation | None:
    """Return the sums that an optimizer of Keras keeps; None: it is none of ours, or has no passes yet."""
    parts = getattr(optimizer, "__dict__", {}).get("_horovod")
    return None if parts is None else parts.accumulation


def _operations(results: Sequence[Any]) -> list[Any]:
    """What control dependencies can be on; nothing where there is no graph."""
    if tf.executing_eagerly():
        return []
    return [each for each in results if isinstance(each, tf.Operation | tf.Tensor | tf.Variable)]
