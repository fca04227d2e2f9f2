"""Optimizers of TensorFlow 1 whose gradients are reduced over ranks; those of Keras get theirs."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from multiring.horovod.process_sets import ProcessSet, global_process_set
from multiring.horovod.reduce_ops import Adasum, Average
from multiring.horovod.tensorflow.accumulation import Accumulation
from multiring.horovod.tensorflow.compression import Compression, Compressor
from multiring.horovod.tensorflow.gradients import GradientOptions, LocalVariables

__all__ = ["DistributedOptimizer"]


class _Distributed(tf.compat.v1.train.Optimizer):
    """Hands an optimizer of TensorFlow 1 gradients that were reduced over ranks."""

    def __init__(
        self,
        optimizer: Any,
        name: str | None,
        use_locking: bool,
        options: GradientOptions,
        accumulation: Accumulation,
    ) -> None:
        super().__init__(use_locking, name or f"Distributed{type(optimizer).__name__}")
        self._optimizer, self._options, self._accumulation = optimizer, options, accumulation
        self._local = LocalVariables()

    def register_local_var(self, var: Any) -> None:
        """Keeps the gradient of a variable on this rank: it is not reduced."""
        self._local.add(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Gradients of the wrapped optimizer, reduced over ranks.

        With several passes for each step they are reduced when they are applied.
        """
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        return pairs if self._accumulation.passes > 1 else self._reduced(pairs)

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """As the wrapped optimizer."""
        pairs = list(grads_and_vars)
        if self._accumulation.passes == 1:
            return self._optimizer.apply_gradients(pairs, global_step, name)
        variables = [variable for _, variable in pairs]

        def apply(gradients: list[Any]) -> Any:
            reduced = self._reduced(list(zip(gradients, variables, strict=True)))
            return self._optimizer.apply_gradients(reduced, global_step)

        return self._accumulation.step([gradient for gradient, _ in pairs], variables, apply)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """As the wrapped optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """As the wrapped optimizer."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """As the wrapped optimizer."""
        return self._optimizer.variables(*args, **kwargs)

    def _reduced(self, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        variables = [variable for _, variable in pairs]
        gradients = self._options.reduce([gradient for gradient, _ in pairs], variables, self._local)
        return list(zip(gradients, variables, strict=True))


class _AdasumDistributed(_Distributed):
    """Each rank steps alone; what the step has changed is combined over the ranks by Adasum."""

    def _reduced(self, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        return pairs

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """As the wrapped optimizer, and combines what has changed."""
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        is_present = [gradient is not None for gradient, _ in pairs]
        before = [_copy_of(_value(variable)) for variable in variables]
        with tf.control_dependencies([] if tf.executing_eagerly() else before):
            stepped = super().apply_gradients(pairs, global_step)
        with tf.control_dependencies([] if tf.executing_eagerly() else [stepped]):
            changes = [
                _value(variable) - old if present else None
                for variable, old, present in zip(variables, before, is_present, strict=True)
            ]
        combined = self._options.reduce(changes, variables, self._local)
        assigned = [
            variable.assign(old + change)
            for variable, old, change in zip(variables, before, combined, strict=True)
            if change is not None
        ]
        return None if tf.executing_eagerly() else tf.group(*assigned, name=name)


def _copy_of(value: Any) -> Any:
    """Return a copy of a variable's value. In a graph of TensorFlow 1 a value may be the variable's memory,
    which `tf.identity` does not copy."""
    return tf.identity(value) if tf.executing_eagerly() else tf.raw_ops.DeepCopy(x=value)


def _value(variable: Any) -> Any:
    return variable.read_value() if hasattr(variable, "read_value") else tf.convert_to_tensor(variable)


def DistributedOptimizer(  # noqa: N802
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer that steps with gradients which are reduced over all ranks.

    Args:
        optimizer: One of `tf.compat.v1.train`, or of Keras.
        name: Of the optimizer, "Distributed" and the class of the wrapped one by default.
        use_locking: As optimizers of TensorFlow 1 have it.
        device_dense: Ignored, as `device_sparse`.
        device_sparse: Ignored.
        compression: What gradients are made of on their way.
        sparse_as_dense: Reduce `tf.IndexedSlices` as dense tensors.
        backward_passes_per_step: Steps whose gradients are added up on each rank before they are reduced.
        op: Average, Sum, or, for optimizers of TensorFlow 1, Adasum of what their steps change.
        gradient_predivide_factor: f: an average divides by f before the reduction, and by size / f after it.
        average_aggregated_gradients: Divide what was added up by `backward_passes_per_step`.
        num_groups: The former name of `groups`.
        groups: Number of groups of gradients that are reduced together, or the variables of each group.
        process_set: Ranks that reduce; others step with their own gradients.
        scale_local_gradients: Divide gradients of local variables by the number of ranks.

    Raises:
        ValueError: Arguments make no sense, or it is no such optimizer.
    """
    options = GradientOptions.of(
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    accumulation = Accumulation(backward_passes_per_step, average_aggregated_gradients, sparse_as_dense)
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        kind = _AdasumDistributed if op == Adasum else _Distributed
        return kind(optimizer, name, use_locking, options, accumulation)
    from multiring.horovod.tensorflow.keras.optimizer import distributed

    return distributed(optimizer, name, options, backward_passes_per_step, average_aggregated_gradients)
