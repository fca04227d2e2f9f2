"""The check that all ranks hold the same variables, where tapes and optimizers reduce gradients."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from multiring.error_text import text_of
from multiring.errors import MismatchError
from multiring.horovod.process_sets import ProcessSet
from multiring.horovod.state_check import SetCheck
from multiring.tensorflow.variables import named_variables

__all__ = ["Numbers", "after_check", "without_numbers"]

Numbers = Callable[[], dict[str, object]]


class _Checked:
    """The check of the variables that one list of gradients belongs to.

    It counts the reductions since all ranks joined last: ranks that had less data have missed some before.
    """

    def __init__(self, process_set: ProcessSet, owner: object) -> None:
        self._process_set = process_set
        self._owner = None if owner is None else weakref.ref(owner)
        self._check = SetCheck(process_set, "hvd.broadcast_variables")
        self._counted_in: object = None
        self._steps = 0

    def is_of(self, process_set: ProcessSet, owner: object) -> bool:
        """Whether this counts the reductions over a process set, by that optimizer."""
        known = None if self._owner is None else self._owner()
        return self._process_set is process_set and known is owner and not self.is_over()

    def is_over(self) -> bool:
        """Whether the optimizer is gone."""
        return self._owner is not None and self._owner() is None

    def run(self, variables: Sequence[weakref.ref[Any]], numbers: Numbers) -> None:
        """Count a reduction, and compare if it is time. Collective.

        Args:
            variables: Whose gradients were reduced.
            numbers: Gives hyperparameters by name.

        Raises:
            MismatchError: The ranks differ.
        """
        operations = self._process_set.operations()
        counted_in = operations, operations.joining.ends
        if self._counted_in != counted_in:
            self._counted_in, self._steps = counted_in, 0
        self._steps += 1

        def entries() -> Iterator[tuple[str, object]]:
            alive = [variable for variable in (ref() for ref in variables) if variable is not None]
            for number, (name, variable) in enumerate(named_variables(alive).items(), 1):
                yield f"parameter {without_numbers(name)} ({number})", np.asarray(variable)

        self._check.run("gradients", self._steps, entries, lambda: numbers().items())


def without_numbers(name: str) -> str:
    """The name of a variable or layer without the numbers that each process counts for itself."""
    return re.sub(r"_?\d+|:.*", "", name)


# By the identity of the first variable, which removes its entry when it goes.
_checked: dict[int, tuple[weakref.ref[Any], list[_Checked]]] = {}


def after_check(
    gradients: list[Any],
    variables: Sequence[Any],
    process_set: ProcessSet,
    numbers: Numbers = dict,
    owner: object = None,
) -> list[Any]:
    """Return the reduced gradients, after a comparison of the variables over ranks, if it is time for one.

    Args:
        gradients: Tensors, `tf.IndexedSlices` or None.
        variables: What they are the gradients of, without those that each rank keeps to itself.
        process_set: Ranks that have reduced the gradients.
        numbers: Gives hyperparameters by name.
        owner: The optimizer that reduces, whose steps are counted; None: a tape.

    Raises:
        MismatchError: Variables differ; inside of a `tf.function` as a `tf.errors.UnknownError`.
    """
    held = [_held(variable) for variable in variables]
    compared = [variable for variable in held if isinstance(variable, tf.Variable)]
    in_session = not tf.compat.v1.executing_eagerly_outside_functions()
    if not compared or (process_set.size() or 1) == 1 or in_session:
        return gradients
    checked = _check_of(compared[0], process_set, owner)
    run = partial(checked.run, [weakref.ref(variable) for variable in compared], numbers)
    if tf.executing_eagerly():
        run()
        return gradients
    made = [gradient for gradient in gradients if gradient is not None]
    # TensorFlow does not see that the function reads variables, so they are read before it and after it, too:
    # those come after the assignments before, and what is assigned later comes after these.
    with tf.control_dependencies(tf.nest.flatten(made, expand_composites=True)):
        before = _reads(compared)
    with tf.control_dependencies(before):
        # An output is what tf.vectorized_map needs, by which jacobian() computes.
        done = tf.numpy_function(_running(run), [], tf.int32)
    with tf.control_dependencies([done]):
        _reads(compared)
        return [
            None if each is None else tf.nest.map_structure(tf.identity, each, expand_composites=True)
            for each in gradients
        ]


def _reads(variables: Sequence[Any]) -> list[Any]:
    return [
        tf.raw_ops.ReadVariableOp(resource=each.handle, dtype=each.dtype.base_dtype) for each in variables
    ]


def _held(variable: Any) -> Any:
    """Return the variable of TensorFlow that one of Keras holds."""
    return getattr(variable, "_value", variable)


def _check_of(variable: Any, process_set: ProcessSet, owner: object) -> _Checked:
    key = id(variable)
    found = _checked.get(key)
    if found is None or found[0]() is not variable:
        reference = weakref.ref(variable, lambda _: _checked.pop(key, None))
        found = _checked[key] = reference, []
    checks = found[1]
    checks[:] = [each for each in checks if not each.is_over()]
    known = next((each for each in checks if each.is_of(process_set, owner)), None)
    if known is None:
        known = _Checked(process_set, owner)
        checks.append(known)
    return known


def _running(run: Callable[[], None]) -> Callable[[], Any]:
    def raising() -> Any:
        try:
            run()
        except MismatchError as error:
            raise RuntimeError(text_of(error)) from error
        return np.int32(0)

    return raising
