"""`DistributedOptimizer`: the wrapper that fits the optimizer it is given."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Unpack

from multiring.errors import UsageError
from multiring.gradients.options import BucketKeywords, ReducerOptions
from multiring.reductions import explain_arguments
from multiring.tensorflow.optimizers.lazy_reduction import WrapperOptions

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["DistributedOptimizer"]


@explain_arguments
def DistributedOptimizer(  # noqa: N802  # used as a class, as in other adapters
    optimizer: Any,
    comm: Communicator | None = None,
    *,
    backward_passes_per_step: int = 1,
    sparse_as_dense: bool = False,
    check_every: int | None = None,
    name: str | None = None,
    **options: Unpack[BucketKeywords],
) -> Any:
    """Wraps an optimizer: gradients are reduced over ranks before it steps.

    Not collective; the ranks' variables and options are compared in the first step. On TensorFlow, gradients
    travel in buckets while the rest of the backward pass runs; on Keras's other backends after it.

    Args:
        optimizer: A Keras 3 optimizer on any backend, with a `LossScaleOptimizer` around it or not, or one of
            tf_keras. If the global policy is mixed_float16 when this is called, Keras 3 optimizers get a
            loss scale, as `compile()` would do it.
        comm: Ranks that train together; the world by default.
        backward_passes_per_step: Steps whose gradients are averaged on each rank, and then reduced and
            applied once.
        sparse_as_dense: Reduce `tf.IndexedSlices` as dense tensors.
        check_every: Steps between two comparisons of variables and the optimizer's variables (the learning
            rate among them) over ranks; see `multiring.ReducerOptions`. Not on Keras's JAX backend.
        name: Name of the optimizer; that of the wrapped one with "distributed_" by default.
        options: How to reduce: `op`, `average`, `bucket_bytes`, `prescale` and
            `postscale`, as in `multiring.ReducerOptions`.

    Returns:
        An optimizer for `compile()` and for custom loops. Its settings and all other attributes are those of
        the given one, to read and to set; `inner_optimizer` is that one, or what is in its loss scale.

    Raises:
        UsageError: `optimizer` is of another kind, or is wrapped already.
    """
    reduction = ReducerOptions.of(options, check_every=check_every)
    wrapping = WrapperOptions(reduction, backward_passes_per_step, sparse_as_dense)
    tf_keras = sys.modules.get("tf_keras")  # imported, or there would be no optimizer of it
    if tf_keras is not None and isinstance(optimizer, tf_keras.optimizers.Optimizer):
        from multiring.tensorflow.optimizers.tf_keras import wrap

        return wrap(optimizer, comm, name, wrapping)
    import keras

    from multiring.tensorflow.optimizers.keras import DistributedKerasOptimizer

    if isinstance(optimizer, DistributedKerasOptimizer):
        raise UsageError("this optimizer is distributed already; wrap the one inside of it")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(
            f"cannot wrap a {type(optimizer).__module__}.{type(optimizer).__name__}; give an optimizer of "
            f"keras or tf_keras"
        )
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if keras.config.dtype_policy().name == "mixed_float16" and not scales:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale_optimizer")
    return DistributedKerasOptimizer(optimizer, comm, wrapping, name)
