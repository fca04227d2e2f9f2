"""State of TensorFlow and Keras that can be committed and restored."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from multiring.horovod.elastic import HostsUpdatedInterrupt, ObjectState, State, reset, run_again
from multiring.horovod.exceptions import HorovodInternalError
from multiring.horovod.objects import broadcast_object
from multiring.horovod.tensorflow.accumulation import accumulation_of
from multiring.horovod.tensorflow.functions import build_optimizer, optimizer_variables

__all__ = [
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Has a function start again from the last commit where a collective fails on all ranks.

    The function's first argument is a `State`, which is synchronised before each call.

    Raises:
        HorovodInternalError: A rank is lost; ranks in its place come in a later release.
    """
    return run_again(func, reset, (HorovodInternalError, tf.errors.FailedPreconditionError))


class _VariablesState(ObjectState):
    """Variables, and objects by name."""

    def _variables(self) -> list[Any]:
        raise NotImplementedError

    _saved: list[Any]

    def _values(self) -> list[Any]:
        return [variable.numpy() for variable in self._variables()]

    def _assign(self, values: list[Any]) -> None:
        for variable, value in zip(self._variables(), values, strict=False):
            variable.assign(value)

    def save(self) -> None:
        """Keeps all of it in memory."""
        self._saved = self._values()
        super().save()

    def restore(self) -> None:
        """Goes back to what was saved."""
        self._assign(self._saved)
        super().restore()

    def sync(self) -> None:
        """Gives all ranks what rank 0 has."""
        self._saved = broadcast_object(self._values())
        self._assign(self._saved)
        super().sync()


class TensorFlowState(_VariablesState):
    """Variables of TensorFlow, and objects by name."""

    def __init__(self, variables: Iterable[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        """Of variables; in a graph of TensorFlow 1, those of a session, all global ones by default."""
        self._session = session
        if variables is None:
            variables = tf.compat.v1.global_variables()
        self.variables = list(variables)
        super().__init__(**kwargs)
        self._saved = self._values()

    def _variables(self) -> list[Any]:
        return self.variables

    def _values(self) -> list[Any]:
        return super()._values() if self._session is None else list(self._session.run(self.variables))

    def _assign(self, values: list[Any]) -> None:
        if self._session is None:
            super()._assign(values)
            return
        for variable, value in zip(self.variables, values, strict=True):
            variable.load(value, self._session)


class TensorFlowKerasState(_VariablesState):
    """A model of Keras, its optimizer, and objects by name."""

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        """Of a model, with the optimizer that it was compiled with by default; `backend` is ignored."""
        self.model = model
        self.optimizer = optimizer or getattr(model, "optimizer", None)
        if self.optimizer is not None and model.built:  # or there would be nothing to restore
            build_optimizer(self.optimizer, model.trainable_variables)
        self._sums = self._partial_sums()
        super().__init__(**kwargs)
        self._saved = self._values()

    def save(self) -> None:
        """Keeps all of it in memory, and the gradients that were added up since the optimizer's last step."""
        self._sums = self._partial_sums()
        super().save()

    def restore(self) -> None:
        """Goes back to what was saved."""
        super().restore()
        accumulation = accumulation_of(self.optimizer)
        if accumulation is not None:
            accumulation.restore(self._sums)

    def sync(self) -> None:
        """Gives all ranks what rank 0 has, but for gradients: each rank keeps those that it has added up."""
        super().sync()
        self._sums = self._partial_sums()

    def _partial_sums(self) -> list[Any] | None:
        accumulation = accumulation_of(self.optimizer)
        return None if accumulation is None else accumulation.values()

    def _variables(self) -> list[Any]:
        found = list(self.model.weights)
        return found if self.optimizer is None else [*found, *optimizer_variables(self.optimizer)]
