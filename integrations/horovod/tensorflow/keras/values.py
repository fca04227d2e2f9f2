"""Collectives of values, such as numbers and arrays of NumPy, and models that are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from multiring.arrays import without_mask
from multiring.horovod.host_calls import Asked, start
from multiring.horovod.process_sets import ProcessSet, global_process_set
from multiring.horovod.reduce_ops import Average, op_name, resolve_op
from multiring.horovod.submissions import reduction
from multiring.horovod.tensorflow.compression import Compression, Compressor
from multiring.horovod.tensorflow.errors import raised_as_tensorflow
from multiring.horovod.tensorflow.functions import broadcast_global_variables
from multiring.horovod.tensorflow.keras.optimizer import DistributedOptimizer
from multiring.horovod.tensorflow.keras_kind import is_tf_keras
from multiring.tensorflow.tensors import to_tensor

__all__ = [
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "load_model",
    "reducescatter",
]

Value = Any


def _call(asked: Asked, value: Value, name: str | None, process_set: ProcessSet) -> Value:
    array = np.array(value.numpy() if hasattr(value, "numpy") else without_mask(value))
    if isinstance(value, float) and not isinstance(value, np.floating):  # np.float64 is both
        array = array.astype(np.float32)
    with raised_as_tensorflow():
        name = name or process_set.operations().auto_name()
        result = start(asked, name, [array], process_set).wait()[0]
    return result[()] if result.ndim == 0 else result


def _of_value(value: Value, compression: type[Compressor]) -> tuple[Value, Any]:
    if compression is Compression.none:
        return value, None
    compressed, ctx = compression.compress(to_tensor(value))
    return compressed.numpy(), ctx


def _to_value(reduced: Value, compression: type[Compressor], ctx: Any) -> Value:
    if ctx is None:
        return reduced
    return compression.decompress(tf.convert_to_tensor(reduced), ctx).numpy()


def allreduce(
    value: Value,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: type[Compressor] = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Value:
    """Reduces a value over all ranks; the average by default. Gives a number or an array of NumPy."""
    factors = float(prescale_factor), float(postscale_factor)
    asked = Asked("allreduce", *reduction(resolve_op(op, average), None, factors, process_set))
    given, ctx = _of_value(value, compression)
    return _to_value(_call(asked, given, name, process_set), compression, ctx)


def allgather(value: Value, name: str | None = None, process_set: ProcessSet = global_process_set) -> Value:
    """Joins the arrays of all ranks along axis 0."""
    return _call(Asked("allgather"), value, name, process_set)


def broadcast(
    value: Value, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Value:
    """The value of rank `root_rank` of the job."""
    return _call(Asked("broadcast", root=root_rank), value, name, process_set)


def reducescatter(
    value: Value,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Value:
    """Reduces an array over all ranks; each gets a share of axis 0."""
    asked = Asked("reducescatter", op_name(op), float(prescale_factor), float(postscale_factor))
    return _call(asked, value, name, process_set)


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type[Any]] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
) -> Any:
    """A model from a file, whose optimizer, with the state it was saved with, is a `DistributedOptimizer`.

    Args:
        filepath: What `model.save` has written.
        custom_optimizers: Classes of optimizers that Keras does not bring.
        custom_objects: What else a model needs that Keras does not bring, by name.
        compression: As in `DistributedOptimizer`.
    """
    objects = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    models = tf.keras.models if is_tf_keras() else keras.models
    model = models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model
