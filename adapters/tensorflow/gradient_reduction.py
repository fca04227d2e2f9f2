"""The gradients of one set of variables, reduced in buckets while the backward pass still runs.

A bucket is one grouped op. It starts as soon as its last gradient is there, whatever the other buckets do,
and matches its peers by name. Beside the buckets travels one small tensor of flags: which gradients this
rank has, and whether it has data at all.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

import tensorflow as tf
from multiring.derived import resolve
from multiring.errors import UsageError
from multiring.gradients.bucketing import ParameterSpec
from multiring.gradients.model_check import check_same
from multiring.gradients.options import ReducerOptions, check_interval, check_parameters
from multiring.gradients.participation import answer_rounds, own_flags
from multiring.tensorflow.drift import DriftCheck
from multiring.tensorflow.ops import grouped_allreduce, next_step
from multiring.tensorflow.reduced import held, mark_reduced
from multiring.tensorflow.sparse import allreduce_slices
from multiring.tensorflow.state_broadcast import broadcast_variables
from multiring.tensorflow.variables import NAMES_ADVICE, describe_variables

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["GradientReduction", "kinds_of"]

Gradient = Any
Kind = Literal["dense", "sparse"] | None
_numbers = itertools.count()
_UNEVEN = (
    "a rank has run out of data before others whose steps run in a tf.function, where averages divide by the "
    "number of all ranks; pass uneven=True to GradientReduction or DistributedGradientTape"
)


class GradientReduction:
    """Reduces the gradients of a fixed list of variables, eagerly or in `tf.function`. Creation is
    collective.

    A gradient that a rank lacks (None) counts as zeros. In eager mode a gradient that no rank has stays
    None. In a `tf.function` what is None is decided once, when it is traced: gradients that no rank had in
    the call that `kinds` describes stay None, and any other comes back as a tensor.

    Attributes:
        comm: The ranks.
        specs: The variables.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        comm: Communicator | None = None,
        options: ReducerOptions | None = None,
        *,
        kinds: Sequence[Kind] | None = None,
        uneven: bool = False,
        state: Callable[[], Any] | None = None,
    ) -> None:
        """Compare the variables over ranks and plan the buckets.

        Args:
            variables: TensorFlow or Keras variables, in forward order, the same on every rank.
            comm: Ranks that train together; the world by default.
            options: How to reduce.
            kinds: What gradients this rank has: "dense", "sparse" (`tf.IndexedSlices`) or None. Ranks may
                differ. Without it all are taken for dense.
            uneven: Ranks may run out of data at different times, also in `tf.function`; see `join`.
            state: Gives variables of the optimizer, to be compared over ranks together with `variables` every
                `options.check_every` steps.

        Raises:
            UsageError: No variables, names that repeat, a dtype that cannot be reduced.
            MismatchError: The ranks have different variables or options.
        """
        self.comm = resolve(comm)
        self._options = options or ReducerOptions()
        self._uneven = uneven
        own = list(kinds) if kinds is not None else ["dense"] * len(variables)
        described = describe_variables(variables)
        plain = [ParameterSpec(name, shape, dtype) for name, shape, dtype in described]
        check_parameters(self.comm.rank, plain, self._options)
        entries = [(spec.name, spec.describe()) for spec in plain]
        every = check_interval(self.comm.rank, self._options.check_every)
        options_entry = ("options", repr((asdict(self._options), uneven, every)))
        compared = [*entries, options_entry]
        check_same(self.comm, compared, "variables of the model", advice=NAMES_ADVICE)
        # A number of its own, the same on every rank, keeps the buckets of several models apart.
        shared = self.comm.allgather_object((next(_numbers), own), name="optimizer")
        self._title = f"{self._options.name} {max(number for number, _ in shared)}"
        everyone = [set(found) for found in zip(*[found for _, found in shared], strict=True)]
        self._drift = DriftCheck(variables, self.comm, every, self._title, state) if every else None
        self._absent = [found == {None} for found in everyone]
        self.specs = tuple(
            ParameterSpec(name, shape, dtype, sparse="sparse" in found)
            for (name, shape, dtype), found in zip(described, everyone, strict=True)
        )
        order = range(len(self.specs) - 1, -1, -1)  # gradients arrive last layer first
        plan = self._options.plan(self.specs, order, self.comm.size)
        members = [[slot.index for slot in bucket.slots] for bucket in plan.buckets]
        self._buckets = [[k for k in bucket if not self.specs[k].sparse] for bucket in members]
        self._variables = [weakref.ref(held(variable)) for variable in variables]

    @tf.autograph.experimental.do_not_convert
    def reduce(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """The gradients reduced over ranks, in the same order. Collective.

        Args:
            gradients: Tensors, `tf.IndexedSlices` or None, one for each variable.

        Raises:
            UsageError: Their number or a shape is not that of the variables.
            tf.errors.OpError: The communication failed; or, in a `tf.function`, a rank has run out of data
                and `uneven` was not set.
        """
        if len(gradients) != len(self.specs):
            raise UsageError(f"{len(gradients)} gradients were given for {len(self.specs)} variables")
        if self.comm.size == 1:
            return [self._scaled(gradient) for gradient in gradients]
        present = [gradient is not None for gradient in gradients]
        reduced, flags = self._round(gradients, present, active=True)
        if tf.executing_eagerly():
            produced = flags[: len(self.specs)].numpy()
            reduced = [value if produced[k] else None for k, value in enumerate(reduced)]
        else:
            reduced = self._without_absent(reduced, present, flags)
        mark_reduced(reduced, self._variables)
        return reduced

    @contextmanager
    def join(self, variables: Sequence[Any] = ()) -> Iterator[None]:
        """Context of a loop that may have fewer iterations on some ranks than on others.

        A rank that leaves it answers the rounds of the others with zeros until all have left; averages
        divide by the number of ranks that still have data. At the end all ranks take over `variables` of one
        that had data to the last. Every rank has to use it, and `reduce` is the only collective inside.

        Raises:
            UsageError: A rank has run out of data before others whose steps run in `tf.function`, and
                `uneven` was not set. The others' steps report the same.
        """
        yield
        if self.comm.size == 1:
            return
        absent = [False] * len(self.specs)

        def answer() -> Any:
            _, flags = self._round([None] * len(self.specs), absent, active=False)
            return self._participation(flags).numpy()

        root = answer_rounds(self.comm, answer)
        if variables:
            broadcast_variables(variables, root, self.comm)

    def _round(
        self, gradients: Sequence[Gradient], present: Sequence[bool], *, active: bool
    ) -> tuple[list[Gradient], Any]:
        """All gradients and the flags reduced."""
        needs_all = self._options.op == "average" and not (self._uneven or tf.executing_eagerly())
        own = np.append(own_flags(present, self.comm.rank, self.comm.size) & active, needs_all)
        step = self._next_step(gradients)
        if self._drift is not None:
            self._drift.run(step, active=active)
        flags = grouped_allreduce(
            [tf.constant(own.astype(np.float32))], name=f"{self._title}: flags", comm=self.comm, step=step
        )[0]
        results: list[Gradient] = [None] * len(self.specs)
        for number, bucket in enumerate(self._buckets):
            for index, value in zip(
                bucket, self._reduce_bucket(number, bucket, gradients, step), strict=True
            ):
                results[index] = value
        for index, spec in enumerate(self.specs):
            if spec.sparse:
                results[index] = self._reduce_slices(spec, gradients[index], step)
        if needs_all:
            return self._checked(results, flags), flags
        if tf.executing_eagerly() and flags[-1].numpy() and not self._participation(flags).numpy().all():
            raise UsageError(f"rank {self.comm.rank}: {_UNEVEN}")
        return self._corrected(results, flags), flags

    def _participation(self, flags: Any) -> Any:
        """The part of the flags that tells which ranks have data."""
        return flags[len(self.specs) : -1]

    def _next_step(self, gradients: Sequence[Gradient]) -> Any:
        """The number of this step, which begins when the gradients of the first bucket are there."""
        buckets = ([gradients[k] for k in bucket if gradients[k] is not None] for bucket in self._buckets)
        first: list[Any] = next(filter(None, buckets), [])
        dense = [
            gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient for gradient in first
        ]
        return next_step(self._title, comm=self.comm, after=dense)

    def _reduce_bucket(
        self, number: int, bucket: Sequence[int], gradients: Sequence[Gradient], step: Any
    ) -> list[Any]:
        options = self._options
        reduced: list[Any] = grouped_allreduce(
            [self._dense(self.specs[index], gradients[index]) for index in bucket],
            options.op,
            name=f"{self._title}[{number}]",
            labels=[self.specs[index].name for index in bucket],
            comm=self.comm,
            prescale=options.prescale,
            postscale=options.postscale,
            priority=number,  # the last is needed first in the next step
            step=step,
        )
        return reduced

    def _dense(self, spec: ParameterSpec, gradient: Gradient) -> Any:
        if gradient is None:
            return tf.zeros(spec.shape, spec.dtype)
        return self._fitting(spec, tf.convert_to_tensor(gradient), spec.shape)

    def _fitting(self, spec: ParameterSpec, value: Any, shape: Sequence[int | None]) -> Any:
        """Values of a gradient in the dtype of its variable, to which Keras's optimizers convert them."""
        converts = value.dtype.is_floating and tf.as_dtype(spec.dtype).is_floating
        if not (converts or value.dtype.name == spec.dtype) or not value.shape.is_compatible_with(shape):
            raise UsageError(
                f"rank {self.comm.rank}: the gradient of '{spec.name}' is {value.dtype.name} {value.shape}, "
                f"the variable is {spec.describe()}"
            )
        return tf.cast(value, spec.dtype)

    def _reduce_slices(self, spec: ParameterSpec, gradient: Gradient, step: Any) -> Any:
        if gradient is None:
            gradient = tf.IndexedSlices(
                tf.zeros((0, *spec.shape[1:]), spec.dtype), tf.zeros((0,), tf.int64), tf.constant(spec.shape)
            )
        elif not isinstance(gradient, tf.IndexedSlices):
            rows = tf.range(spec.shape[0], dtype=tf.int64)
            gradient = tf.IndexedSlices(gradient, rows, tf.constant(spec.shape))
        values = self._fitting(spec, tf.convert_to_tensor(gradient.values), (None, *spec.shape[1:]))
        gradient = tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        name = f"{self._title}: {spec.name}"
        return allreduce_slices(
            gradient, self._options.op, name=name, comm=self.comm, scale=self._options.scale, step=step
        )

    def _corrected(self, results: list[Gradient], flags: Any) -> list[Gradient]:
        """Averages over the ranks that have data, where the core has divided by the number of all."""
        if self._options.op != "average":
            return results
        count = tf.math.count_nonzero(self._participation(flags), dtype=tf.int32)
        factor = self.comm.size / tf.maximum(count, 1)

        def scaled() -> list[Gradient]:
            return [_times(value, factor) for value in results]

        if tf.executing_eagerly():
            return scaled() if 0 < int(count) < self.comm.size else results
        return list(tf.cond(count < self.comm.size, scaled, lambda: [_times(value, 1) for value in results]))

    def _checked(self, results: list[Gradient], flags: Any) -> list[Gradient]:
        """In a traced function that was not prepared for it: an error if a rank has no data.

        The results come together: a rank that ended with the error before its buckets are through would
        leave others waiting for its part.
        """
        count = tf.math.count_nonzero(self._participation(flags), dtype=tf.int32)
        buckets = [results[bucket[0]] for bucket in self._buckets if bucket]
        buckets += [results[k].values for k, spec in enumerate(self.specs) if spec.sparse]
        with tf.control_dependencies(buckets):
            check = tf.debugging.assert_equal(count, self.comm.size, f"multiring: UsageError: {_UNEVEN}")
        with tf.control_dependencies([check]):
            return [_identity(value) for value in results]

    def _without_absent(self, reduced: list[Gradient], present: Sequence[bool], flags: Any) -> list[Gradient]:
        """In a traced function: None where no rank has a gradient."""
        gone = [k for k, absent in enumerate(self._absent) if absent and not present[k]]
        if not gone:
            return reduced
        names = ", ".join(self.specs[k].name for k in gone[:3])
        check = tf.debugging.assert_equal(
            tf.gather(flags, gone),
            0.0,
            f"multiring: UsageError: a variable that had no gradient on any rank in the first step has one "
            f"on another "
            f"rank now ({names}); run the same functions on all ranks",
        )
        with tf.control_dependencies([check]):
            return [None if k in gone else _identity(value) for k, value in enumerate(reduced)]

    def _scaled(self, gradient: Gradient) -> Gradient:
        scale = self._options.scale
        return gradient if gradient is None or scale == 1.0 else _times(gradient, scale)


def kinds_of(gradients: Sequence[Gradient]) -> list[Kind]:
    """What each gradient is: "dense", "sparse" or None."""
    return [
        None if g is None else "sparse" if isinstance(g, tf.IndexedSlices) else "dense" for g in gradients
    ]


def _map(gradient: Gradient, change: Callable[[Any], Any]) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(change(gradient.values), gradient.indices, gradient.dense_shape)
    return change(gradient)


def _identity(gradient: Gradient) -> Gradient:
    return _map(gradient, tf.identity)


def _times(gradient: Gradient, factor: Any) -> Gradient:
    return _map(gradient, lambda value: value * tf.cast(factor, value.dtype))
