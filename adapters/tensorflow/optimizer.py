"""`DistributedOptimizer`: the wrapper that fits the optimizer it is given."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal

from multiring.errors import UsageError
from multiring.gradients.bucketing import BUCKET_BYTES, FIRST_BUCKET_BYTES
from multiring.reductions import explain_arguments

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["DistributedOptimizer"]


@explain_arguments
def DistributedOptimizer(  # noqa: N802  # used as a class, as in other adapters
    optimizer: Any,
    comm: Communicator | None = None,
    *,
    op: Literal["average", "sum"] = "average",
    backward_passes_per_step: int = 1,
    prescale: float = 1.0,
    postscale: float = 1.0,
    bucket_bytes: int = BUCKET_BYTES,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
    sparse_as_dense: bool = False,
    check_every: int | None = None,
    name: str | None = None,
) -> Any:
    """Wraps an optimizer: gradients are reduced over ranks before it steps.

    Not collective; the ranks' variables and options are compared in the first step. On TensorFlow, gradients
    travel in buckets while the rest of the backward pass runs; on Keras's other backends after it.

    Args:
        optimizer: A Keras 3 optimizer on any backend, with a `LossScaleOptimizer` around it or not, or one of
            tf_keras. If the global policy is mixed_float16 when this is called, Keras 3 optimizers get a
            loss scale, as `compile()` would do it.
        comm: Ranks that train together; the world by default.
        op: "average" or "sum" of the gradients.
        backward_passes_per_step: Steps whose gradients are averaged on each rank, and then reduced and
            applied once.
        prescale: Factor applied before the reduction.
        postscale: Factor applied after it.
        bucket_bytes: Limit of a bucket, in bytes.
        first_bucket_bytes: Limit of the first bucket of each dtype, in bytes.
        sparse_as_dense: Reduce `tf.IndexedSlices` as dense tensors.
        check_every: Compare variables and the optimizer's variables (the learning rate among them) over ranks
            every so many steps; 0: never; None: as MULTIRING_CHECK_EVERY says (100). Not on Keras's JAX
            backend.
        name: Name of the optimizer; that of the wrapped one with "distributed_" by default.

    Returns:
        An optimizer for `compile()` and for custom loops; `inner_optimizer` is the wrapped one.

    Raises:
        UsageError: `optimizer` is of another kind, or is wrapped already.
    """
    options: dict[str, Any] = {
        "op": op,
        "backward_passes_per_step": backward_passes_per_step,
        "prescale": prescale,
        "postscale": postscale,
        "bucket_bytes": bucket_bytes,
        "first_bucket_bytes": first_bucket_bytes,
        "sparse_as_dense": sparse_as_dense,
        "check_every": check_every,
    }
    tf_keras = sys.modules.get("tf_keras")  # imported, or there would be no optimizer of it
    if tf_keras is not None and isinstance(optimizer, tf_keras.optimizers.Optimizer):
        from multiring.tensorflow.tf_keras_optimizer import wrap

        return wrap(optimizer, comm, name, options)
    import keras

    from multiring.tensorflow.keras_optimizer import DistributedKerasOptimizer, DistributedLossScaleOptimizer

    if isinstance(optimizer, DistributedKerasOptimizer | DistributedLossScaleOptimizer):
        raise UsageError("this optimizer is distributed already; wrap the one inside of it")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(
            f"cannot wrap a {type(optimizer).__module__}.{type(optimizer).__name__}; give an optimizer of "
            f"keras or tf_keras"
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return DistributedLossScaleOptimizer(
            optimizer.inner_optimizer,
            optimizer.initial_scale,
            optimizer.dynamic_growth_steps,
            name,
            comm,
            **options,
        )
    if keras.config.dtype_policy().name == "mixed_float16":
        return DistributedLossScaleOptimizer(optimizer, name=name, comm=comm, **options)
    return DistributedKerasOptimizer(optimizer, name, comm, **options)
