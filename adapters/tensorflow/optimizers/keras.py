"""Keras 3 optimizers that step with gradients reduced over ranks, on every backend of Keras."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras

from multiring.errors import UsageError
from multiring.tensorflow.optimizers.lazy_reduction import Delegating, LazyReduction, WrapperOptions
from multiring.tensorflow.optimizers.xla import keep_xla_off

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["DistributedKerasOptimizer"]

Tensors = Sequence[Any]


class DistributedKerasOptimizer(Delegating, keras.optimizers.Optimizer):
    """Holds an optimizer and hands it gradients that were reduced over ranks.

    It is a `keras.optimizers.Optimizer` by type because `compile()` accepts nothing else; its attributes are
    those of the wrapped one. Where that is a `LossScaleOptimizer`, it looks at gradients after they were
    reduced: all ranks skip the same steps. It is saved as the wrapped one, so that a model can be loaded
    where multiring is not imported.
    """

    apply_gradients = keras.optimizers.Optimizer.apply_gradients

    _reduction: LazyReduction
    _count: Any  # of backward passes
    _accumulators: list[Any]
    _produced: set[int]  # variables that have had a gradient in any pass, or trace of one

    def __init__(
        self, optimizer: Any, comm: Communicator | None, options: WrapperOptions, name: str | None
    ) -> None:
        """Wrap an optimizer; see `DistributedOptimizer`."""
        backend, settings = keras.backend.backend(), frozenset[str]()
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            # A LossScaleOptimizer has these as well, and does not use them.
            common = {*keras.optimizers.Optimizer.get_config(optimizer), "exclude_from_weight_decay"}
            settings = frozenset(common - {"name", "loss_scale_factor"})
        if options.backward_passes_per_step > 1 and (settings or backend == "jax"):
            raise UsageError(
                f"backward_passes_per_step does not go with "
                f"{'a dynamic loss scale' if settings else 'the JAX backend of Keras'}; give the optimizer "
                "itself gradient_accumulation_steps"
            )
        self.__dict__.update(
            _wrapped=optimizer,
            _settings=settings,
            options=options,
            _reduction=LazyReduction(comm, options, backend),
            _count=None,
            _accumulators=[],
            _produced=set(),
        )
        self.__dict__["name"] = name or f"distributed_{self.inner_optimizer.name}"
        if self.built:
            self.build([])
        keep_xla_off()

    @property
    def inner_optimizer(self) -> Any:
        """The wrapped optimizer, or that inside of a wrapped `LossScaleOptimizer`."""
        return self._wrapped.inner_optimizer if self._settings else self._wrapped

    def _holder(self, name: str) -> Any:
        scale = self._wrapped
        if self._settings and (name in self._settings or not hasattr(scale, name)):
            return scale.inner_optimizer
        return scale

    def __setattr__(self, name: str, value: Any) -> None:
        caller = sys._getframe(1).f_locals.get("self") if name == "loss_scale_factor" else None
        if isinstance(caller, keras.optimizers.LossScaleOptimizer):
            # It sets this to None in the optimizer that it is given. It decides from this rank's gradients
            # alone whether to step, so ranks would wait for others that do not come.
            raise UsageError(
                "a LossScaleOptimizer has to be inside: "
                "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(opt)) "
                "instead of LossScaleOptimizer(DistributedOptimizer(opt)); compile() adds one by itself to "
                "a model of policy mixed_float16"
            )
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: Any) -> DistributedKerasOptimizer:
        inside = copy.deepcopy(self._wrapped, memo)
        return DistributedKerasOptimizer(inside, self._reduction.comm, self.options, self.name)

    def build(self, variables: Sequence[Any]) -> None:
        """Create the variables of the wrapped optimizer, and accumulators where they are wanted."""
        if not self.built:
            self._wrapped.build(variables)
        if self.options.backward_passes_per_step > 1 and self._count is None:
            self._count = keras.Variable(0, dtype="int", trainable=False, name="backward_passes")
            self._accumulators = [
                keras.Variable("zeros", one.shape, one.dtype, trainable=False, name=f"gradient_sum_{k}")
                for k, one in enumerate(self._trainable_variables)
            ]

    def apply(self, grads: Tensors, trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduce gradients over ranks and update variables with them. Collective.

        Raises:
            MismatchError: The ranks have different variables or options (in the first step).
        """
        if len(grads) == 0:
            return
        self.build(list(trainable_variables or ()))
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        passes = self.options.backward_passes_per_step
        if passes == 1:
            self._wrapped.apply(self._reduce(grads, variables), variables)
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
        self._wrapped.apply(self._reduce(means, variables), variables)
        for total in sums:
            if total is not None:
                total.assign(keras.ops.zeros_like(total))
        self._count.assign(0)

    def stateless_apply(
        self, optimizer_variables: Tensors, grads: Tensors, trainable_variables: Tensors
    ) -> Any:
        """The same for Keras's JAX backend."""
        known = [*self._trainable_variables, *self.variables]
        mapping = list(zip(known, [*trainable_variables, *optimizer_variables], strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            reduced = self._reduce(grads, self._trainable_variables)
        return self._wrapped.stateless_apply(optimizer_variables, reduced, trainable_variables)

    def _reduce(self, grads: Tensors, variables: Sequence[Any]) -> list[Any]:
        return self._reduction.reduce(grads, variables, self._wrapped)

    @property
    def variables(self) -> list[Any]:
        """Those of the wrapped optimizer, and the accumulators if there are any."""
        own = [] if self._count is None else [self._count, *self._accumulators]
        return [*self._wrapped.variables, *own]
