"""The check that all ranks still hold the same variables, in eager mode and inside of `tf.function`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import tensorflow as tf
from multiring.arrays import checksum
from multiring.error_text import text_of
from multiring.errors import MismatchError
from multiring.state.advice import advice_for
from multiring.state.check import NUMBERS_EVERY, Scope, scope_at
from multiring.tensorflow.ops import allgather
from multiring.tensorflow.variables import named_variables

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["BROADCAST", "DriftCheck"]

_NOT_TAKING_PART = -1
_OPTIMIZER = "optimizer variable"
_LARGEST = (1 << 63) - 1
BROADCAST = "broadcast_variables (under fit(): the callback callbacks.BroadcastInitialState())"


class DriftCheck:
    """Compares checksums of variables over ranks in the steps that `multiring.state.check.scope_at` names.

    As `StateCheck` does for arrays; but part of the graph where there is one.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        comm: Communicator,
        every: int,
        title: str,
        state: Callable[[], Any] | None = None,
    ) -> None:
        """Create. Not collective.

        Args:
            variables: What is trained; kept by weak references. Tensors are left out.
            comm: Ranks that train together.
            every: Steps between two comparisons.
            title: Name of the reduction whose steps these are.
            state: Gives further variables, those of an optimizer.
        """
        self._variables = [weakref.ref(v) for v in variables if hasattr(v, "assign")]
        self._comm, self._every, self._title, self._state = comm, every, title, state

    def run(self, step: Any, *, active: bool) -> None:
        """Compare if it is time. Collective; every rank calls it in each step, with the number of the step.

        Raises:
            MismatchError: Variables differ; inside of a `tf.function` as a `tf.errors.UnknownError`.
        """
        named = self._named()
        if not named:
            return
        numbers = {name: variable for name, variable in named.items() if _is_number(variable)}

        def compare(scope: Scope) -> None:
            if scope is Scope.EVERYTHING:
                self._compare(named, step, active, "state")
            elif scope is Scope.NUMBERS and numbers:
                self._compare(numbers, step, active, "numbers")

        if tf.executing_eagerly():
            compare(scope_at(int(step), self._every))
        else:
            scope = scope_in_graph(step, self._every)
            tf.switch_case(scope, {one.value: partial(compare, one) for one in Scope})

    def _named(self) -> dict[str, Any]:
        alive = [variable for variable in (ref() for ref in self._variables) if variable is not None]
        # The optimizer's come first: another learning rate makes other parameters.
        state = [] if self._state is None else self._state()
        found = {f"{_OPTIMIZER} '{name}'": v for name, v in named_variables(state).items()}
        return found | {f"parameter '{name}'": v for name, v in named_variables(alive).items()}

    def _compare(self, named: dict[str, Any], step: Any, active: bool, what: str) -> None:
        if active:
            values = [tf.convert_to_tensor(variable) for variable in named.values()]
            own = tf.ensure_shape(tf.numpy_function(_checksums, values, tf.int64), [len(values)])
        else:
            own = tf.fill([len(named)], tf.constant(_NOT_TAKING_PART, tf.int64))
        rows = allgather(own[None], name=f"{self._title}: {what}", comm=self._comm, step=step)

        def verify(rows: Any, step: Any) -> None:
            if error := self._difference(named, rows, int(step)):
                raise RuntimeError(text_of(error))

        if not tf.executing_eagerly():
            tf.numpy_function(verify, [rows, step], [])
        elif error := self._difference(named, rows.numpy(), int(step)):
            raise error

    def _difference(self, named: dict[str, Any], rows: Any, step: int) -> MismatchError | None:
        """The error that tells what differs first, and who has what; None if nothing does."""
        names = list(named)
        ranks = [rank for rank in range(len(rows)) if rows[rank, 0] != _NOT_TAKING_PART]
        differing = np.flatnonzero((rows[ranks] != rows[ranks[:1]]).any(0)) if ranks else np.zeros(0, np.intp)
        if len(differing) == 0:
            return None
        # A number of the optimizer's is a hyperparameter; a parameter may be one as well.
        arrays = [not (name.startswith(_OPTIMIZER) and _is_number(v)) for name, v in named.items()]
        first = int(differing[0])
        values: dict[int, list[int]] = {}
        for rank in ranks:
            values.setdefault(int(rows[rank, first]), []).append(rank)
        who = "; ".join(
            f"rank{'s' if len(have) > 1 else ''} {', '.join(map(str, have))} with checksum {value:016x}"
            for value, have in values.items()
        )
        return MismatchError(
            f"the training state at step {step} differs over ranks, seen on rank {self._comm.rank}: "
            f"{names[first]} is on {who} ({len(differing)} of {len(names)} variables differ); "
            + advice_for(step, [names[k] for k in differing if arrays[k]], sum(arrays), BROADCAST),
            rank=self._comm.rank,
            host=self._comm.host,
            operation="model check",
            tensor=names[first],
        )


def scope_in_graph(step: Any, every: int) -> Any:
    """The value of `scope_at` as an operation: int32 of no dimensions."""
    is_power = tf.equal(tf.bitwise.bitwise_and(step, step - 1), 0)
    everything = (step > 1) & (tf.equal(step % every, 0) | ((step < every) & is_power))
    numbers = (step > 1) & tf.equal(step % NUMBERS_EVERY, 0)
    none, some, all_ = (tf.constant(one.value) for one in (Scope.NOTHING, Scope.NUMBERS, Scope.EVERYTHING))
    return tf.where(everything, all_, tf.where(numbers, some, none))


def _is_number(variable: Any) -> bool:
    return bool(variable.shape.num_elements() == 1)


def _checksums(*values: Any) -> Any:
    """Of the elements of arrays; numbers of at least 0. Shape (arrays,), int64."""
    return np.array([checksum(np.asarray(value)) & _LARGEST for value in values], np.int64)
