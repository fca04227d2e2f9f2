"""Keras 3 optimizers that step with gradients reduced over ranks, on every backend of Keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras

from multiring.errors import UsageError
from multiring.tensorflow.optimizers.lazy_reduction import Delegating, LazyReduction, WrapperOptions
from multiring.tensorflow.optimizers.xla import keep_xla_off

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["DistributedKerasOptimizer", "DistributedLossScaleOptimizer"]

Tensors = Sequence[Any]


class DistributedKerasOptimizer(Delegating, keras.optimizers.Optimizer):
    """Holds an optimizer and hands it gradients that were reduced over ranks.

    It is a `keras.optimizers.Optimizer` by type because `compile()` accepts nothing else. Variables,
    learning rate, iterations and settings are those of `inner_optimizer`. It is saved as that one, so that a
    model can be loaded where multiring is not imported.
    """

    _wrapped = False  # until the inner optimizer is there

    def __init__(
        self, inner_optimizer: Any, comm: Communicator | None, options: WrapperOptions, name: str | None
    ) -> None:
        """Wrap an optimizer; see `DistributedOptimizer`."""
        super().__init__(learning_rate=0.0, name=name or f"distributed_{inner_optimizer.name}")
        self.inner_optimizer = inner_optimizer
        self.options = options
        self._reduction = LazyReduction(comm, self.options, keras.backend.backend())
        self._count: Any = None
        self._accumulators: list[Any] = []
        self._produced: set[int] = set()  # variables that have had a gradient in any pass, or trace of one
        if self.options.backward_passes_per_step > 1 and keras.backend.backend() == "jax":
            raise UsageError(
                "backward_passes_per_step does not work on Keras's JAX backend; give the optimizer itself "
                "gradient_accumulation_steps"
            )
        self._wrapped = True
        keep_xla_off()

    def build(self, variables: Sequence[Any]) -> None:
        """Create the variables of the inner optimizer, and accumulators where they are wanted."""
        if self.built:
            return
        self.inner_optimizer.build(variables)
        super().build(variables)
        if self.options.backward_passes_per_step > 1:
            self._count = self.add_variable((), "zeros", "int", name="backward_passes")
            self._accumulators = [
                self.add_variable_from_reference(variable, name="gradient_sum") for variable in variables
            ]

    def apply(self, grads: Tensors, trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduce gradients over ranks and update variables with them. Collective.

        Raises:
            MismatchError: The ranks have different variables or options (in the first step).
        """
        if len(grads) == 0:
            return
        if not self.built:
            self.build(list(trainable_variables or ()))
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        passes = self.options.backward_passes_per_step
        if passes == 1:
            self.inner_optimizer.apply(self._reduce(grads, variables), trainable_variables)
            return
        indexes = [self._get_variable_index(variable) for variable in variables]
        for index, gradient in zip(indexes, grads, strict=True):
            if gradient is not None:
                self._produced.add(index)
                self._accumulators[index].assign_add(keras.ops.convert_to_tensor(gradient))
        self._count.assign_add(1)
        sums = [self._accumulators[index] if index in self._produced else None for index in indexes]
        keras.ops.cond(
            keras.ops.equal(self._count, passes), lambda: self._step(sums, variables), lambda: None
        )

    def _step(self, sums: list[Any], variables: list[Any]) -> None:
        """Apply the means of what was accumulated; None is for variables that never had a gradient."""
        passes = self.options.backward_passes_per_step
        means = [None if total is None else total / passes for total in sums]
        self.inner_optimizer.apply(self._reduce(means, variables), variables)
        for total in sums:
            if total is not None:
                total.assign(keras.ops.zeros_like(total))
        self._count.assign(0)

    def _reduce(self, grads: Tensors, variables: Sequence[Any]) -> list[Any]:
        return self._reduction.reduce(grads, variables, self.inner_optimizer)

    @property
    def variables(self) -> list[Any]:
        """Those of the inner optimizer, and the accumulators if there are any."""
        own = [] if self._count is None else [self._count, *self._accumulators]
        return [*self.inner_optimizer.variables, *own]

    @property
    def loss_scale_factor(self) -> Any:
        """Fixed loss scale of the inner optimizer, 1.0 where it has none.

        Never None: TensorFlow's tracking leaves out an assignment of what is there, and the one below counts.
        """
        return (self.inner_optimizer.loss_scale_factor if self._wrapped else None) or 1.0

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: Any) -> None:
        if not self._wrapped:
            return
        if value is None:
            # What LossScaleOptimizer does to the optimizer it is given. It decides from this rank's
            # gradients alone whether to step, so ranks would wait for others that do not come.
            raise UsageError(
                "a LossScaleOptimizer has to be inside: "
                "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(opt)) "
                "instead of LossScaleOptimizer(DistributedOptimizer(opt)); compile() adds one by itself to "
                "a model of "
                "policy mixed_float16"
            )
        self.inner_optimizer.loss_scale_factor = value

    def scale_loss(self, loss: Any) -> Any:
        """The loss as the inner optimizer scales it."""
        return self.inner_optimizer.scale_loss(loss)

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Passed on to the inner optimizer."""
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def save_own_variables(self, store: Any) -> None:
        """Saves what the inner optimizer would; sums of an unfinished group of passes are left out."""
        self.inner_optimizer.save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Loads what `save_own_variables`, or a plain optimizer, has saved."""
        self.inner_optimizer.load_own_variables(store)

    @property  # type: ignore[misc]  # not to be set
    def __class__(self) -> Any:
        """Of the inner optimizer: the class by whose name Keras saves an object, and loads it."""
        return self.inner_optimizer.__class__ if self._wrapped else type(self)


class DistributedLossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """A `LossScaleOptimizer` that looks at gradients after they were reduced: all ranks skip the same steps.

    It is one by type, so that `compile()` does not put another one around it.
    """

    def __init__(
        self,
        inner_optimizer: Any,
        comm: Communicator | None,
        options: WrapperOptions,
        name: str | None = None,
        initial_scale: float = 2.0**15,
        dynamic_growth_steps: int = 2000,
    ) -> None:
        """Like `keras.optimizers.LossScaleOptimizer`; see `DistributedOptimizer`."""
        super().__init__(
            inner_optimizer,
            initial_scale,
            dynamic_growth_steps,
            name or f"distributed_{inner_optimizer.name}",
        )
        self.options = options
        if self.options.backward_passes_per_step > 1:
            raise UsageError(
                "backward_passes_per_step does not go with a dynamic loss scale; give the inner optimizer "
                "gradient_accumulation_steps"
            )
        self._reduction = LazyReduction(comm, self.options, keras.backend.backend())
        keep_xla_off()

    def apply(self, grads: Tensors, trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduce gradients over ranks; then step, or skip the step, as all ranks do. Collective."""
        if not self.built:
            self.build(list(trainable_variables or ()))
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        super().apply(self._reduction.reduce(grads, variables, self), variables)

    def stateless_apply(
        self, optimizer_variables: Tensors, grads: Tensors, trainable_variables: Tensors
    ) -> Any:
        """The same for Keras's JAX backend."""
        reduced = self._reduction.reduce(grads, self._trainable_variables, self)
        return super().stateless_apply(optimizer_variables, reduced, trainable_variables)

    @property  # type: ignore[misc]  # not to be set
    def __class__(self) -> Any:
        """Keras's, as which it is saved; see `DistributedKerasOptimizer`."""
        return keras.optimizers.LossScaleOptimizer
