"""The contract of adapters, over TensorFlow: eager, and in a traced function, prepared for uneven data or
not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray

import multiring.tensorflow
from multiring import Communicator
from multiring.errors import UsageError
from multiring.gradients.options import ReducerOptions
from multiring.tensorflow import translate_errors
from tests.adapters.contract import Adapter, AdapterContract, batch, starting_weights
from tests.on_ranks import all_raise, on_ranks

Array = NDArray[Any]


class EagerAdapter(Adapter):
    """Implements `AdapterUnderTest` with an eager tape and a reduction of its gradients."""

    package = multiring.tensorflow

    uneven: ClassVar[bool] = False

    def __init__(
        self, comm: Communicator, weights: Mapping[str, Array], bucket_bytes: int, **options: Any
    ) -> None:
        self._comm = comm
        self._names = list(weights)
        self._model = {name: tf.Variable(value, name=name) for name, value in weights.items()}
        self._reduction = multiring.tensorflow.GradientReduction(
            list(self._model.values()),
            comm,
            ReducerOptions(bucket_bytes=bucket_bytes, **options),
            uneven=self.uneven,
        )
        self._local: list[Any] = [None] * len(weights)  # gradients that were not reduced yet
        self._found: list[Any] = [None] * len(weights)

    def _loss(self, x: Any, y: Any, extra: bool) -> Any:
        model = self._model
        hidden = tf.tanh(x @ model["first"] + model["offset"])
        output = hidden @ model["second"]
        if extra:
            output = output + hidden @ model["extra"]
        return tf.reduce_sum((output - y) ** 2) / (2.0 * tf.cast(tf.shape(x)[0], tf.float64))

    def _gradients(self, x: Any, y: Any, extra: bool) -> tuple[Any, list[Any]]:
        with tf.GradientTape() as tape:
            loss = self._loss(x, y, extra)
        return loss, tape.gradient(loss, list(self._model.values()))

    def backward(self, x: Array, y: Array, *, extra: bool = True, synchronise: bool = True) -> float:
        loss, gradients = self._gradients(tf.constant(x), tf.constant(y), extra)
        self._local = add(self._local, gradients)
        if synchronise:
            local, self._local = self._local, [None] * len(self._names)
            with translate_errors():
                self._found = add(self._found, self._reduction.reduce(local))
        return float(loss)

    def gradients(self) -> dict[str, Array | None]:
        pairs = zip(self._names, self._found, strict=True)
        return {name: None if value is None else value.numpy() for name, value in pairs}

    def zero_grad(self) -> None:
        self._found = [None] * len(self._names)

    def step(self, rate: float) -> None:
        for name, gradient in zip(self._names, self._found, strict=True):
            if gradient is not None:
                self._model[name].assign_sub(rate * gradient)

    def weights(self) -> dict[str, Array]:
        return {name: np.array(variable.numpy()) for name, variable in self._model.items()}

    def broadcast(self, root: int) -> None:
        multiring.tensorflow.broadcast_variables(self._model, root, self._comm)

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        with translate_errors(), self._reduction.join(list(self._model.values())):
            yield

    def close(self) -> None:
        self._local = self._found = []


def add(first: list[Any], second: list[Any]) -> list[Any]:
    """Sums of gradients of which either may be None."""
    pairs = zip(first, second, strict=True)
    return [one if other is None else other if one is None else one + other for one, other in pairs]


class TestTensorFlowEager(AdapterContract):
    adapter = EagerAdapter


class FunctionAdapter(EagerAdapter):
    """The same, with forward, backward and reduction in one traced function; accumulation stays eager."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._traced = tf.function(self._gradients_reduced, reduce_retracing=True)

    def _gradients_reduced(self, x: Any, y: Any, extra: bool, local: list[Any]) -> tuple[Any, list[Any]]:
        loss, gradients = self._gradients(x, y, extra)
        return loss, self._reduction.reduce(add(local, gradients))

    def backward(self, x: Array, y: Array, *, extra: bool = True, synchronise: bool = True) -> float:
        if not synchronise:
            return super().backward(x, y, extra=extra, synchronise=synchronise)
        local, self._local = self._local, [None] * len(self._names)
        with translate_errors():
            loss, reduced = self._traced(tf.constant(x), tf.constant(y), extra, local)
        self._found = add(self._found, reduced)
        return float(loss)


class UnevenFunctionAdapter(FunctionAdapter):
    uneven = True


class TestTensorFlowFunction(AdapterContract):
    adapter = FunctionAdapter
    IN_ONE = tuple(name for name in AdapterContract.IN_ONE if name != "test_uneven_data")

    @on_ranks(3)
    def test_a_parameter_is_unused_on_all_ranks(self, comm: Communicator) -> None:
        """What is None is decided when the reduction is made; later a gradient that no rank has is zeros."""
        model = self.adapter(comm, starting_weights(), 400)
        x, y = batch(comm.rank, 3)
        for _ in range(2):
            model.backward(x, y, extra=False)
            found = model.gradients()["extra"]
            assert found is None or not found.any()
            model.backward(x, y)
            before = model.gradients()["extra"]
            assert before is not None
            assert before.any()
            model.backward(x, y, extra=False)
            np.testing.assert_array_equal(model.gradients()["extra"], before)
            model.zero_grad()
        model.close()

    @on_ranks(3)
    @all_raise(UsageError, "pass uneven=True")
    def test_uneven_data(self, comm: Communicator) -> None:
        """Takes preparation; no rank goes on without."""
        super().test_uneven_data(comm)


@pytest.mark.full
class TestTensorFlowPreparedForUnevenData:
    """What preparation changes: by what averages are divided."""

    adapter = UnevenFunctionAdapter
    train = AdapterContract.train
    test_uneven_data = AdapterContract.test_uneven_data
    test_ranks_train_like_one = AdapterContract.test_ranks_train_like_one
    test_a_parameter_is_unused_on_some_ranks = AdapterContract.test_a_parameter_is_unused_on_some_ranks
