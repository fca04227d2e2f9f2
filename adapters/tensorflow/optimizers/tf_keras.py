"""tf_keras (Keras 2) optimizers that step with gradients reduced over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tf_keras

import tensorflow as tf
from multiring.errors import UsageError
from multiring.tensorflow.optimizers.lazy_reduction import Delegating, LazyReduction, WrapperOptions

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["DistributedTfKerasOptimizer", "wrap"]

_tracking = tf.__internal__.tracking
_DelegatingTrackable: Any = _tracking.DelegatingTrackableMixin


class DistributedTfKerasOptimizer(Delegating, _DelegatingTrackable, tf_keras.optimizers.Optimizer):
    """Holds an optimizer and hands it gradients that were reduced over ranks.

    It is a tf_keras optimizer by type because `compile()` accepts nothing else; variables, settings and the
    format of checkpoints are the wrapped optimizer's own. It is saved as that one.
    """

    @_tracking.no_automatic_dependency_tracking
    def __init__(
        self, inner_optimizer: Any, comm: Communicator | None, options: WrapperOptions, name: str | None
    ) -> None:
        """Wrap an optimizer; see `DistributedOptimizer`."""
        # Not the optimizer's own constructor: state is the wrapped optimizer's.
        self._optimizer = inner_optimizer
        _DelegatingTrackable.__init__(self, inner_optimizer)
        self._name = name or f"Distributed{inner_optimizer.name}"
        self.options = options
        if self.options.backward_passes_per_step > 1:
            raise UsageError(
                "backward_passes_per_step is not supported for tf_keras; use an optimizer of Keras 3"
            )
        self._reduction = LazyReduction(comm, self.options, "tensorflow")

    @property
    def inner_optimizer(self) -> Any:
        """The wrapped optimizer."""
        return self._optimizer

    def aggregate_gradients(self, grads_and_vars: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Gradients reduced over ranks. Collective. Called by a LossScaleOptimizer around this one, too."""
        gradients, variables = zip(*grads_and_vars, strict=True)
        reduced = self._reduction.reduce(gradients, variables, self._optimizer)
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
        return self._optimizer.apply_gradients(pairs, name=name, skip_gradients_aggregation=True)

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> Any:
        """Those of the wrapped optimizer, of this rank alone."""
        return self._optimizer.compute_gradients(loss, var_list, tape)

    def build(self, var_list: Sequence[Any]) -> Any:
        """Create the wrapped optimizer's variables."""
        return self._optimizer.build(var_list)

    @property
    def variables(self) -> Any:
        """Those of the wrapped optimizer."""
        return self._optimizer.variables

    def __getattr__(self, name: str) -> Any:
        """Everything else is the wrapped optimizer's."""
        if name in ("_optimizer", "_trackable"):
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    @property  # type: ignore[misc]  # not to be set
    def __class__(self) -> Any:
        """Of the wrapped optimizer: the class by whose name tf_keras saves an object, and loads it."""
        return self._optimizer.__class__ if "_optimizer" in vars(self) else type(self)


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
