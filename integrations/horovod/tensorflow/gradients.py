"""Gradients of a list of variables, reduced one by one or in groups."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from multiring.horovod.process_sets import ProcessSet, global_process_set
from multiring.horovod.reduce_ops import Adasum, Average
from multiring.horovod.request import Source
from multiring.horovod.tensorflow.compression import Compression, Compressor
from multiring.horovod.tensorflow.differentiable import Reduction, begin_allreduce
from multiring.horovod.tensorflow.drift import Numbers, after_check, without_numbers
from multiring.horovod.tensorflow.graph_calls import name_in_graph, note_unreduced, number

__all__ = ["GradientOptions", "LocalVariables", "identity_of", "source_of"]


def identity_of(variable: Any) -> int:
    """What tells a variable from others; one of Keras 3 is the one of TensorFlow that it holds."""
    held = getattr(variable, "_value", None) if hasattr(variable, "_value") else None
    return id(variable if held is None else held)


class LocalVariables:
    """Variables whose gradients each rank keeps to itself."""

    def __init__(self, variables: Iterable[Any] = ()) -> None:
        self._held = list(variables)
        self._known = {identity_of(variable) for variable in self._held}

    def add(self, variable: Any) -> None:
        """One more."""
        self._held.append(variable)  # or its identity could be another's one day
        self._known.add(identity_of(variable))

    def __contains__(self, variable: Any) -> bool:
        return identity_of(variable) in self._known


@dataclass(frozen=True)
class GradientOptions:
    """How gradients are reduced.

    Attributes:
        compression: What they are made of on their way.
        sparse_as_dense: Whether `tf.IndexedSlices` are reduced as dense tensors.
        op: Average, Sum or Adasum.
        predivide: What an average divides by before the reduction.
        groups: Number of groups that are reduced together, or the variables of each group; None: one by one.
        process_set: Ranks that reduce; others keep their own gradients.
        scale_local: Whether gradients of local variables are divided by the number of ranks.
    """

    compression: type[Compressor] = Compression.none
    sparse_as_dense: bool = False
    op: int = Average
    predivide: float = 1.0
    groups: Any = None
    process_set: ProcessSet = field(default_factory=lambda: global_process_set)
    scale_local: bool = True

    @classmethod
    def of(
        cls,
        *,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Any = None,
        scale_local_gradients: bool = True,
        **options: Any,
    ) -> GradientOptions:
        """From the arguments that tapes and optimizers have.

        Raises:
            ValueError: They do not go together.
        """
        op = options.get("op", Average)
        if gradient_predivide_factor != 1.0 and op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        if num_groups != 0:
            text = "Parameter `num_groups` has been replaced by `groups` and will be removed."
            warnings.warn(text, DeprecationWarning, stacklevel=4)
            groups = num_groups if groups is None else groups
        is_count = isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0
        if groups is not None and not is_count and not isinstance(groups, list | tuple):
            raise ValueError("groups should be a non-negative integer or a list of list of tf.Variable.")
        predivide = float(gradient_predivide_factor)
        return cls(groups=groups, predivide=predivide, scale_local=scale_local_gradients, **options)

    def reduce(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        local: LocalVariables | None = None,
        numbers: Numbers = dict,
        owner: object = None,
    ) -> list[Any]:
        """The gradients reduced over ranks, in the same order; None stays None.

        Args:
            gradients: Tensors, `tf.IndexedSlices` or None.
            variables: What they are the gradients of: the same variables in the same order on all ranks.
            local: Those that are not reduced.
            numbers: Gives hyperparameters, by name, which are compared over ranks with the variables.
            owner: The optimizer, whose steps the comparisons count; None: a tape.

        Raises:
            MismatchError: The variables or numbers of the ranks differ.
            tf.errors.OpError: A rank has a gradient where another has None. In a graph, when it runs.
        """
        process_set = self.process_set
        results = list(gradients)
        if not process_set.included():
            note_unreduced(process_set)
            return results
        present = [k for k, gradient in enumerate(results) if gradient is not None]
        if self.sparse_as_dense:
            for k in present:
                results[k] = tf.convert_to_tensor(results[k])
        is_local = [local is not None and variable in local for variable in variables]
        size = process_set.size() or 1
        if size > 1 or self.predivide != 1.0:
            shared = [k for k in range(len(results)) if not is_local[k]]
            self._reduce_all(results, shared, variables)
            if self.op != Adasum:  # variables then differ before their changes are combined
                compared = [variables[k] for k in shared]
                results = after_check(results, compared, process_set, numbers, owner)
        else:
            note_unreduced(process_set)
        for k in present:
            if is_local[k] and self.scale_local and size > 1:
                results[k] = _divided(results[k], number("size", process_set, None))
        return results

    def _reduce_all(self, results: list[Any], shared: Sequence[int], variables: Sequence[Any]) -> None:
        """Reduce gradients in their places. Every variable has an operation, also one without a gradient on
        this rank: a rank that has one sees the difference."""
        title = (
            name_in_graph("gradients", None, self.process_set) or self.process_set.operations().auto_name()
        )
        started = []
        for members in self._grouped(results, shared, variables):
            tensors = [tf.zeros([0]) if results[k] is None else results[k] for k in members]
            is_sparse = isinstance(tensors[0], tf.IndexedSlices)
            how = Reduction(
                op=self.op,
                scale=(1.0, 1.0) if is_sparse else (1 / self.predivide, self.predivide),
                compression=self.compression,
                name=f"{title}.{members[0]}",
                process_set=self.process_set,
                sources=tuple(source_of(k, variables, results[k] is not None) for k in members),
            )
            started.append((members, begin_allreduce(tensors, how)))
        failure: Exception | None = None
        absent = []
        for members, wait in started:
            try:
                for k, value in zip(members, wait(), strict=True):
                    if results[k] is None:
                        absent.append(value)
                    else:
                        results[k] = value
            except tf.errors.OpError as error:  # the others are waited for, or they would stay in flight
                failure = failure or error
        if failure is not None:
            raise failure
        if absent and not tf.executing_eagerly():
            for k in shared:
                results[k] = _after(absent, results[k])

    def _grouped(
        self, gradients: Sequence[Any], shared: Sequence[int], variables: Sequence[Any]
    ) -> Iterator[list[int]]:
        """Return the places of gradients that are reduced together. Sparse ones are reduced alone.

        Groups are made of all shared variables, so that they are the same on ranks which have gradients of
        different ones.
        """
        group_of: dict[int, int] = {}
        if isinstance(self.groups, int) and self.groups > 0 and shared:
            count = min(self.groups, len(shared))
            size, extra = divmod(len(shared), count)
            ends = [size * k + min(k, extra) for k in range(count + 1)]
            for number, (i, j) in enumerate(itertools.pairwise(ends)):
                group_of.update(dict.fromkeys(shared[i:j], number))
        elif isinstance(self.groups, list | tuple):
            number_of = {identity_of(v): n for n, group in enumerate(self.groups) for v in group}
            known = {k: number_of.get(identity_of(variables[k])) for k in shared}
            group_of = {k: number for k, number in known.items() if number is not None}
        members: dict[int, list[int]] = {}
        for k in shared:
            is_sparse = isinstance(gradients[k], tf.IndexedSlices)
            members.setdefault(-1 - k if is_sparse else group_of.get(k, -1 - k), []).append(k)
        yield from members.values()


def source_of(k: int, variables: Sequence[Any], is_present: bool, what: str = "gradient") -> Source:
    """Describe a variable: its name ends alike in all processes, apart from numbers that they count."""
    variable = variables[k]
    is_variable = hasattr(variable, "assign")  # the names of tensors differ by process
    title = str(getattr(variable, "path", None) or variable.name) if is_variable else ""
    kind = without_numbers(title.rpartition("/")[2])
    return Source(k + 1, len(variables), kind, is_present, title, what)


def _after(operations: Sequence[Any], gradient: Any) -> Any:
    """Return the gradient, which a session then does not compute without these operations."""
    if gradient is None:
        return None
    with tf.control_dependencies(operations):
        return tf.nest.map_structure(tf.identity, gradient, expand_composites=True)


def _divided(gradient: Any, size: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_divided(gradient.values, size), gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(size, gradient.dtype)
