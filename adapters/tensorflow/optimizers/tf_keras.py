"""tf_keras (Keras 2) optimizers that step with gradients reduced over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tf_keras

from multiring.errors import UsageError
from multiring.tensorflow.optimizers.lazy_reduction import Delegating, LazyReduction, WrapperOptions

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["DistributedTfKerasOptimizer", "wrap"]


class DistributedTfKerasOptimizer(Delegating, tf_keras.optimizers.Optimizer):
    """Holds an optimizer and hands it gradients that were reduced over ranks.

    It is a tf_keras optimizer by type because `compile()` accepts nothing else; all attributes and the format
    of checkpoints are the wrapped optimizer's own. It is saved as that one.
    """

    minimize = tf_keras.optimizers.Optimizer.minimize

    def __init__(
        self, optimizer: Any, comm: Communicator | None, options: WrapperOptions, name: str | None
    ) -> None:
        """Wrap an optimizer; see `DistributedOptimizer`."""
        if options.backward_passes_per_step > 1:
            raise UsageError(
                "backward_passes_per_step is not supported for tf_keras; use an optimizer of Keras 3"
            )
        self.__dict__.update(
            _wrapped=optimizer,
            name=name or f"Distributed{optimizer.name}",
            options=options,
            _reduction=LazyReduction(comm, options, "tensorflow"),
        )

    @property
    def inner_optimizer(self) -> Any:
        """The wrapped optimizer."""
        return self._wrapped

    def aggregate_gradients(self, grads_and_vars: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Gradients reduced over ranks. Collective. Called by a LossScaleOptimizer around this one, too."""
        gradients, variables = zip(*grads_and_vars, strict=True)
        reduced = self._reduction.reduce(gradients, variables, self._wrapped)
        return list(zip(reduced, variables, strict=True))

    def apply_gradients(
        self,
        grads_and_vars: Sequence[tuple[Any, Any]],
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Reduce gradients over ranks, unless that is said to be done, and update variables with them."""
        pairs = list(grads_and_vars)
        if not skip_gradients_aggregation and kwargs.pop("experimental_aggregate_gradients", True):
            pairs = self.aggregate_gradients(pairs)
        return self._wrapped.apply_gradients(pairs, name=name, skip_gradients_aggregation=True)


def wrap(
    optimizer: Any, comm: Communicator | None, name: str | None, options: WrapperOptions
) -> DistributedTfKerasOptimizer:
    """See `DistributedOptimizer`."""
    if isinstance(optimizer, DistributedTfKerasOptimizer):
        raise UsageError("this optimizer is distributed already; wrap the one inside of it")
    if isinstance(optimizer, tf_keras.mixed_precision.LossScaleOptimizer) or hasattr(optimizer, "loss_scale"):
        raise UsageError(
            "with tf_keras the LossScaleOptimizer has to be outside: "
            "LossScaleOptimizer(DistributedOptimizer(opt)), as "
            "compile() does it by itself for a model of policy mixed_float16"
        )
    made: DistributedTfKerasOptimizer = DistributedTfKerasOptimizer(optimizer, comm, options, name)
    return made
