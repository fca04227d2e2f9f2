"""Optimizers of Keras 3 and of tf_keras whose gradients are reduced over ranks, of a subclass of the wrapped
one's class."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from multiring.horovod.process_sets import ProcessSet, global_process_set
from multiring.horovod.reduce_ops import Adasum, Average
from multiring.horovod.tensorflow.accumulation import Accumulation
from multiring.horovod.tensorflow.compression import Compression, Compressor
from multiring.horovod.tensorflow.drift import Numbers
from multiring.horovod.tensorflow.functions import build_optimizer
from multiring.horovod.tensorflow.gradients import GradientOptions, LocalVariables, identity_of
from multiring.tensorflow.optimizers.xla import keep_xla_off

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer", "distributed"]


class _Parts:
    """What an optimizer of ours has besides what Keras knows of."""

    def __init__(self, accumulation: Accumulation) -> None:
        self.accumulation, self.local = accumulation, LocalVariables()
        self.variables: list[Any] = []  # those that an optimizer of tf_keras was built for


class _Distributed:
    """What both kinds have.

    Attributes:
        made_with: How gradients are reduced, and the arguments of `Accumulation`. Of the class, so that what
            is made from a config reduces as well.
    """

    uses_collectives = True  # so Keras is kept from compiling with XLA
    made_with: tuple[GradientOptions, tuple[int, bool, bool]]

    def register_local_var(self, var: Any) -> None:
        """Keeps the gradient of a variable on this rank: it is not reduced."""
        self._parts().local.add(var)

    def _built_for(self) -> Sequence[Any]:
        """Return all variables that the optimizer was built for; none where that is not known."""
        raise NotImplementedError

    def _parts(self) -> _Parts:
        if "_horovod" not in self.__dict__:
            # Not by an attribute, which Keras would look into for variables.
            self.__dict__["_horovod"] = _Parts(Accumulation(*self.made_with[1]))
        found: _Parts = self.__dict__["_horovod"]
        return found

    def _reduced(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients. Of all variables that the optimizer was built for, those that are not
        passed count as None: programs, and Keras, leave out what has no gradient on this rank."""
        options, local, all_variables = self.made_with[0], self._parts().local, self._built_for()
        given = {identity_of(v): gradient for v, gradient in zip(variables, gradients, strict=True)}
        places = {identity_of(variable): k for k, variable in enumerate(all_variables)}
        if not given.keys() <= places.keys():
            return options.reduce(gradients, variables, local, _rate_of(self), self)
        everything = [given.get(place) for place in places]
        reduced = options.reduce(everything, all_variables, local, _rate_of(self), self)
        return [reduced[places[identity_of(variable)]] for variable in variables]

    def _step(
        self, gradients: Sequence[Any], variables: Sequence[Any], step: Any, *, is_reduced: bool = False
    ) -> Any:
        """Has `step` get the reduced gradients, if it is time."""

        def apply(found: Sequence[Any]) -> Any:
            return step(found if is_reduced else self._reduced(found, variables))

        accumulation = self._parts().accumulation
        return (
            apply(gradients)
            if accumulation.passes == 1
            else accumulation.step(gradients, variables, apply, self._skipped)
        )

    def _skipped(self) -> Any:
        iterations: Any = self.iterations  # type: ignore[attr-defined]
        return iterations.assign_add(tf.ones([], iterations.dtype))


def _rate_of(optimizer: Any) -> Numbers:
    """Return what gives the learning rate as a hyperparameter. A schedule makes it of the steps of this rank,
    which may have had less data than others."""
    reference = weakref.ref(optimizer)

    def numbers() -> dict[str, object]:
        alive = reference()
        rate = getattr(getattr(alive, "inner_optimizer", alive), "_learning_rate", None)
        return {} if rate is None or callable(rate) else {"learning_rate": float(np.asarray(rate))}

    return numbers


class _OfKeras3(_Distributed):
    """Goes before a class of Keras 3 in the order of bases."""

    def _built_for(self) -> Sequence[Any]:
        own: Any = self
        return list(own._trainable_variables) if own.built else []

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduces gradients over ranks, and updates the variables."""
        parent: Any = super()
        if len(grads) == 0:
            return
        own: Any = self
        variables = list(own._trainable_variables if trainable_variables is None else trainable_variables)
        if self.made_with[1][0] > 1 and not own.built:  # outside of the branch that applies
            with keras.name_scope(own.name):
                own.build(variables)
        self._step(list(grads), variables, lambda found: parent.apply(found, trainable_variables))

    def __deepcopy__(self, memo: Any) -> Any:
        raise ValueError(
            "copy.deepcopy of an optimizer of hvd.DistributedOptimizer would be the plain one, which "
            "reduces nothing: copy the optimizer before it is wrapped, and wrap the copy"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        caller = sys._getframe(1).f_locals.get("self") if name == "loss_scale_factor" else None
        if isinstance(caller, keras.optimizers.LossScaleOptimizer) and caller is not self:
            # It sets this in the optimizer that it is given. It decides from this rank's gradients alone
            # whether to step, so ranks would wait for others that do not come.
            raise ValueError(
                "a LossScaleOptimizer has to be inside: hvd.DistributedOptimizer(LossScaleOptimizer(opt)); "
                "for a model of policy mixed_float16 set the policy before hvd.DistributedOptimizer is called"
            )
        super().__setattr__(name, value)


class _OfTfKeras(_Distributed):
    """Goes before a class of tf_keras in the order of bases."""

    def build(self, var_list: Sequence[Any]) -> None:
        """Make the optimizer's variables, and remember whose gradients they are for."""
        parent: Any = super()
        if not self._parts().variables:
            self._parts().variables = list(var_list)
        build_optimizer(parent, list(var_list))

    def _built_for(self) -> Sequence[Any]:
        return self._parts().variables

    def aggregate_gradients(self, grads_and_vars: Iterable[Any]) -> list[Any]:
        """Reduces gradients over ranks. A LossScaleOptimizer around this one calls it before it decides
        whether to step, which so is the same on all ranks."""
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        reduced = self._reduced([gradient for gradient, _ in pairs], variables)
        return list(zip(reduced, variables, strict=True))

    _aggregate_gradients = aggregate_gradients  # what the legacy optimizers call it

    def apply_gradients(
        self, grads_and_vars: Iterable[Any], name: str | None = None, *flag: bool, **kwargs: Any
    ) -> Any:
        """Reduces gradients over ranks, unless that is said to be done, and updates the variables."""
        parent: Any = super()
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        is_legacy = not hasattr(parent, "aggregate_gradients")
        skips = kwargs.pop("skip_gradients_aggregation", False)
        reduces = kwargs.pop("experimental_aggregate_gradients", True)
        if flag:
            skips, reduces = (skips, flag[0]) if is_legacy else (flag[0], reduces)
        # By keyword: the order of these differs by class.
        said = (
            {"experimental_aggregate_gradients": False} if is_legacy else {"skip_gradients_aggregation": True}
        )
        kwargs |= said if name is None else {**said, "name": name}

        def step(found: Sequence[Any]) -> Any:
            return parent.apply_gradients(list(zip(found, variables, strict=True)), **kwargs)

        own: Any = self
        if self.made_with[1][0] > 1 and hasattr(own, "build") and not getattr(own, "_built", True):
            with tf.init_scope():
                own.build(variables)
        is_reduced = skips or not reduces
        return self._step([gradient for gradient, _ in pairs], variables, step, is_reduced=is_reduced)


def distributed(
    optimizer: Any, name: str | None, options: GradientOptions, passes: int, averages: bool
) -> Any:
    """The optimizer with its state, of a subclass of its class that reduces.

    Raises:
        ValueError: It is no optimizer of Keras, wrapped already, or told to use Adasum.
    """
    tf_keras = sys.modules.get("tf_keras")  # imported, or there would be no optimizer of it
    kinds: list[tuple[Any, type[Any]]] = [(keras.optimizers.Optimizer, _OfKeras3)]
    if tf_keras is not None:
        of_tf_keras = tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer
        kinds.append((of_tf_keras, _OfTfKeras))
    base = next((base for kind, base in kinds if isinstance(optimizer, kind)), None)
    if base is None or isinstance(optimizer, _Distributed):
        raise ValueError(
            "Provided optimizer doesn't inherit from either legacy TensorFlow or Keras optimizer: "
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            if base is None
            else "this optimizer is distributed already"
        )
    Accumulation(passes, averages, options.sparse_as_dense)  # raises what is wrong
    if passes > 1 and getattr(optimizer, "gradient_accumulation_steps", None):
        raise ValueError(
            "gradient_accumulation_steps of the optimizer and backward_passes_per_step do the same: leave "
            "one out; with backward_passes_per_step fewer bytes are sent"
        )
    if options.op == Adasum:
        raise ValueError("op == Adasum is not supported yet with Keras")
    if base is _OfKeras3:
        optimizer = _prepared(optimizer)
    wrapped = type(optimizer)
    made_with = options, (passes, averages, options.sparse_as_dense)
    names = {"__module__": wrapped.__module__, "made_with": made_with}
    metaclass: Any = type(wrapped)
    made = metaclass(wrapped.__name__, (base, wrapped), names)
    result = made.__new__(made)
    result.__dict__.update(optimizer.__dict__)
    if name is not None:
        result.__dict__["name" if "name" in result.__dict__ else "_name"] = name
    return result


def _prepared(optimizer: Any) -> Any:
    """An optimizer of Keras 3 that `compile()` will not put another one around."""
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            f"Keras computes with {keras.backend.backend()}; multiring.horovod reduces gradients where it "
            "computes with TensorFlow, and multiring.tensorflow.DistributedOptimizer on every backend"
        )
    keep_xla_off()
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    # Outside of ours it would decide by this rank's gradients alone whether to step.
    if keras.config.dtype_policy().name == "mixed_float16" and not scales:
        return keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer


def DistributedOptimizer(  # noqa: N802
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer of Keras that steps with gradients which are reduced over all ranks: with the state of the
    one that is given, and of a subclass of its class.

    Args:
        optimizer: One of Keras 3 that computes with TensorFlow, or of tf_keras.
        name: Of the optimizer; that of the given one by default.
        device_dense: Ignored, as `device_sparse`.
        device_sparse: Ignored.
        compression: What gradients are made of on their way.
        sparse_as_dense: Reduce `tf.IndexedSlices` as dense tensors.
        gradient_predivide_factor: f: an average divides by f before the reduction, and by size / f after it.
        op: Average or Sum.
        backward_passes_per_step: Steps whose gradients are added up on each rank before they are reduced.
        average_aggregated_gradients: Divide what was added up by `backward_passes_per_step`.
        num_groups: The former name of `groups`.
        groups: Number of groups of gradients that are reduced together, or the variables of each group.
        process_set: Ranks that reduce; others step with their own gradients.
        scale_local_gradients: Divide gradients of local variables by the number of ranks.

    Raises:
        ValueError: Arguments make no sense, or it is no optimizer of Keras.
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
    return distributed(optimizer, name, options, backward_passes_per_step, average_aggregated_gradients)


def PartialDistributedOptimizer(  # noqa: N802
    optimizer: Any, name: str | None = None, *args: Any, local_layers: Any = None, **options: Any
) -> Any:
    """`DistributedOptimizer` that does not reduce the gradients of `local_layers`, a layer or several, which
    have been built."""
    made = DistributedOptimizer(optimizer, name, *args, **options)
    layers = [] if local_layers is None else local_layers
    for layer in layers if isinstance(layers, Iterable) else [layers]:
        for variable in layer.trainable_weights:
            made.register_local_var(variable)
    return made
