"""The TensorFlow and Keras adapter.

import multiring.tensorflow

comm = multiring.init()
model.compile(multiring.tensorflow.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss=...)
model.fit(multiring.tensorflow.shard_dataset(dataset).batch(32),
          callbacks=[multiring.tensorflow.callbacks.BroadcastInitialState()])

Parts are imported when they are used: with Keras on another backend TensorFlow need not be installed.
"""

from __future__ import annotations

from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING, Any

from multiring.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from multiring.metrics import average_metrics
    from multiring.state.broadcast import broadcast_object
    from multiring.tensorflow import callbacks
    from multiring.tensorflow.batch_norm import sync_batch_norm
    from multiring.tensorflow.data import shard_dataset
    from multiring.tensorflow.errors import translate_errors
    from multiring.tensorflow.gradient_reduction import GradientReduction
    from multiring.tensorflow.ops import (
        allgather,
        allreduce,
        alltoall,
        broadcast,
        grouped_allreduce,
        grouped_broadcast,
        reducescatter,
    )
    from multiring.tensorflow.optimizers.distributed import DistributedOptimizer
    from multiring.tensorflow.state_broadcast import batch_weight, broadcast_variables, sync_buffers
    from multiring.tensorflow.tape import DistributedGradientTape

_find, __dir__ = _lazy_names(
    __name__,
    {
        "DistributedGradientTape": ".tape",
        "DistributedOptimizer": ".optimizers.distributed",
        "GradientReduction": ".gradient_reduction",
        "allgather": ".ops",
        "allreduce": ".ops",
        "alltoall": ".ops",
        "average_metrics": "multiring.metrics",
        "batch_weight": ".state_broadcast",
        "broadcast": ".ops",
        "broadcast_object": "multiring.state.broadcast",
        "broadcast_variables": ".state_broadcast",
        "callbacks": ".callbacks",
        "grouped_allreduce": ".ops",
        "grouped_broadcast": ".ops",
        "reducescatter": ".ops",
        "shard_dataset": ".data",
        "sync_batch_norm": ".batch_norm",
        "sync_buffers": ".state_broadcast",
        "translate_errors": ".errors",
    },
)

if _find_spec("tensorflow") is None and _find_spec("keras") is None:
    raise ImportError(
        "multiring.tensorflow needs TensorFlow or Keras, and neither is installed; run "
        "pip install 'multiring[tensorflow]'"
    )


def __getattr__(name: str) -> Any:
    try:
        return _find(name)
    except ModuleNotFoundError as error:
        if error.name not in ("tensorflow", "keras"):
            raise
        raise ImportError(
            f"multiring.tensorflow.{name} needs {error.name}, which is not installed; run "
            "pip install 'multiring[tensorflow]'"
        ) from error


__all__ = [
    "DistributedGradientTape",
    "DistributedOptimizer",
    "GradientReduction",
    "allgather",
    "allreduce",
    "alltoall",
    "average_metrics",
    "batch_weight",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "grouped_allreduce",
    "grouped_broadcast",
    "reducescatter",
    "shard_dataset",
    "sync_batch_norm",
    "sync_buffers",
    "translate_errors",
]
