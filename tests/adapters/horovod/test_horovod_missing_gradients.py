"""Ranks with gradients of different variables of one shape: an error that names the variable, at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
import tf_keras

import multiring.horovod.tensorflow as hvt
import multiring.horovod.tensorflow.keras as hvd
from multiring import Communicator
from tests.adapters.horovod.support import with_hvd
from tests.on_ranks import all_raise

tf1 = tf.compat.v1
Gradients = Callable[..., Any]


def variables() -> list[Any]:
    return [tf.Variable(tf.zeros(3), name=f"head{k}") for k in range(3)]


def loss(own: list[Any], rank: int) -> Any:
    """The first variable has a gradient on rank 0 alone, the second on rank 1 alone, the last on no rank."""
    return tf.reduce_sum(own[rank] * 10.0**rank)


def by_tape(own: list[Any], rank: int, **options: Any) -> Any:
    with hvt.DistributedGradientTape(tf.GradientTape(), **options) as tape:
        value = loss(own, rank)
    return tape.gradient(value, own)


def by_partial_tape(own: list[Any], rank: int) -> Any:
    layer = keras.layers.Dense(1)
    layer.build((None, 1))
    with hvt.PartialDistributedGradientTape(tf.GradientTape(), local_layers=layer) as tape:
        value = loss(own, rank)
    return tape.gradient(value, [*layer.trainable_weights, *own])


def in_function(own: list[Any], rank: int) -> Any:
    return tf.function(by_tape)(own, rank)


def as_rows(own: list[Any], rank: int) -> Any:
    """The gradient of the second variable are rows."""
    with hvt.DistributedGradientTape(tf.GradientTape()) as tape:
        value = tf.reduce_sum(own[0] if rank == 0 else tf.gather(own[1], [0]))
    return tape.gradient(value, own)


def dense_beside_rows(own: list[Any], rank: int) -> Any:
    with hvt.DistributedGradientTape(tf.GradientTape()) as tape:
        value = tf.reduce_sum(own[0] if rank == 0 else tf.gather(own[0], [0]))
    return tape.gradient(value, own)


def plain(own: list[Any], rank: int) -> list[Any]:
    with tf.GradientTape() as tape:
        value = loss(own, rank)
    found: list[Any] = tape.gradient(value, own)
    return found


def by_keras(own: list[Any], rank: int) -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply(plain(own, rank), own)


def by_keras_without_none(own: list[Any], rank: int) -> None:
    """The program leaves out what has no gradient."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build(own)
    pairs = zip(plain(own, rank), own, strict=True)
    optimizer.apply_gradients([(gradient, variable) for gradient, variable in pairs if gradient is not None])


def by_tf_keras(own: list[Any], rank: int) -> None:
    optimizer = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(1.0))
    optimizer.apply_gradients(zip(plain(own, rank), own, strict=True))


def by_scaled_tf_keras(own: list[Any], rank: int) -> None:
    """The optimizer around it leaves out what has no gradient."""
    inner = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(1.0))
    optimizer = tf_keras.mixed_precision.LossScaleOptimizer(inner)
    optimizer.apply_gradients(zip(plain(own, rank), own, strict=True))


def by_passes(own: list[Any], rank: int) -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    for _ in range(2):
        optimizer.apply(plain(own, rank), own)


def by_tensorflow_1(own: list[Any], rank: int) -> None:
    optimizer = hvt.DistributedOptimizer(tf1.train.GradientDescentOptimizer(1.0))
    optimizer.compute_gradients(lambda: loss(own, rank), own)


def by_adasum(own: list[Any], rank: int) -> None:
    optimizer = hvt.DistributedOptimizer(tf1.train.GradientDescentOptimizer(1.0), op=hvt.Adasum)
    optimizer.apply_gradients(zip(plain(own, rank), own, strict=True))


def in_session(own: list[Any], rank: int) -> None:
    """What is fetched does not depend on a gradient that is None."""
    with tf.Graph().as_default(), tf1.Session() as session:
        own = [tf1.get_variable(f"head{k}", [3]) for k in range(3)]
        found = by_tape_of_session(own, rank)
        session.run(tf1.global_variables_initializer())
        session.run([each for each in found if each is not None])


def by_tape_of_session(own: list[Any], rank: int) -> Any:
    optimizer = hvt.DistributedOptimizer(tf1.train.GradientDescentOptimizer(1.0))
    return [gradient for gradient, _ in optimizer.compute_gradients(loss(own, rank), own)]


WAYS: dict[str, Gradients] = {
    "tape": by_tape,
    "partial tape": by_partial_tape,
    "function": in_function,
    "one group": lambda own, rank: by_tape(own, rank, groups=1),
    "two groups": lambda own, rank: by_tape(own, rank, groups=2),
    "named groups": lambda own, rank: by_tape(own, rank, groups=[own[:2]]),
    "sum in half precision": lambda own, rank: by_tape(
        own, rank, op=hvt.Sum, compression=hvt.Compression.fp16
    ),
    "adasum of tensors": lambda own, rank: by_tape(own, rank, op=hvt.Adasum),
    "rows": as_rows,
    "keras": by_keras,
    "keras without None": by_keras_without_none,
    "tf_keras": by_tf_keras,
    "tf_keras with a loss scale": by_scaled_tf_keras,
    "passes": by_passes,
    "TensorFlow 1": by_tensorflow_1,
    "adasum of steps": by_adasum,
    "session": in_session,
}


@pytest.mark.parametrize("way", WAYS)
@with_hvd()
def test_gradients_of_different_variables(comm: Communicator, way: str) -> None:
    """The job stays usable."""
    with pytest.raises(tf.errors.OpError, match=r"Mismatched gradients.*no gradient of variable 'head[01]"):
        WAYS[way](variables(), comm.rank)
    assert float(hvt.allreduce(tf.constant(comm.rank + 1.0), op=hvt.Sum, name="after")) == 3.0


@with_hvd()
@all_raise(tf.errors.OpError, "One rank did an allreduce, but another rank did an allgather")
def test_rows_beside_a_dense_gradient(comm: Communicator) -> None:
    dense_beside_rows(variables(), comm.rank)


@pytest.mark.parametrize("other", ["dense", "None"])
@pytest.mark.parametrize("in_function", [False, True])
@with_hvd()
def test_steps_after_rows_that_did_not_match(comm: Communicator, in_function: bool, other: str) -> None:
    """No part of the reduction that has failed meets one of the next step."""
    table, kernel = tf.Variable(tf.zeros((4, 1))), tf.Variable(1.0)

    def gradients(row: Any, is_sparse: bool) -> Any:
        with hvt.DistributedGradientTape(tf.GradientTape()) as tape:
            value = kernel * 1.0
            if is_sparse:
                value += tf.reduce_sum(tf.gather(table, row))
            elif other == "dense":
                value += tf.reduce_sum(table * 1.0)
        return [each for each in tape.gradient(value, [table, kernel]) if each is not None]

    run = tf.function(gradients) if in_function else gradients
    with pytest.raises(tf.errors.OpError, match="Mismatched"):
        run(tf.constant([0]), comm.rank == 0)
    for row in range(1, 4):
        found = tf.convert_to_tensor(run(tf.constant([row]), True)[0])
        assert found[:, 0].numpy().tolist() == [float(k == row) for k in range(4)]


@with_hvd()
def test_named_rows_that_did_not_match(comm: Communicator) -> None:
    def rows(number: int, count: int = 1) -> Any:
        values = tf.ones((count, 3), tf.float16) * (comm.rank + 1.0)
        return tf.IndexedSlices(values, tf.range(number, number + count), tf.constant([6, 3]))

    for dense in (tf.ones((6, 3), tf.float16), tf.ones(2)):
        with pytest.raises(tf.errors.OpError, match="Mismatched collective operations"):
            hvt.allreduce(rows(0) if comm.rank == 0 else dense, name="rows")
        found = hvt.allreduce(rows(2 + comm.rank, comm.rank), name="rows", op=hvt.Sum)
        assert found.indices.numpy().tolist() == [3]
        assert found.values.numpy().tolist() == [[2.0] * 3]
    wide = tf.IndexedSlices(tf.ones((1, 3 + comm.rank)), tf.constant([0]), tf.constant([6, 3]))
    with pytest.raises(tf.errors.OpError, match="dimension 1 equal to 3"):
        hvt.allreduce(wide, name="rows")
    numbers = tf.constant([0], tf.int64 if comm.rank else tf.int32)
    with pytest.raises(tf.errors.OpError, match="numbers of int32.*numbers of int64"):
        hvt.allreduce(tf.IndexedSlices(tf.ones((1, 3)), numbers, tf.constant([6, 3])), name="rows")


@with_hvd()
def test_a_rank_without_any_gradient(comm: Communicator) -> None:
    own = variables()
    for _ in range(2):
        with hvt.DistributedGradientTape(tf.GradientTape()) as tape:
            value = tf.reduce_sum(own[0]) if comm.rank else tf.constant(1.0)
        with pytest.raises(tf.errors.OpError, match="no gradient of variable 'head0"):
            tape.gradient(value, own[:1])


@pytest.mark.parametrize("groups", [None, 2])
@with_hvd()
def test_gradients_that_are_none_everywhere(comm: Communicator, groups: int | None) -> None:
    own = variables()
    factor = tf.constant(1.0 + comm.rank)

    def gradients() -> Any:
        with hvt.DistributedGradientTape(tf.GradientTape(), groups=groups) as tape:
            value = tf.reduce_sum(own[0] + own[2]) * factor
        return tape.gradient(value, own)

    for run in (gradients, tf.function(gradients)):
        for _ in range(2):
            first, none, last = run()
            assert none is None
            assert float(first[0]) == float(last[0]) == 1.5


@with_hvd()
def test_a_function_that_ranks_trace_in_another_order(comm: Communicator) -> None:
    """A flag chooses what has a gradient; the runs of its traces meet one by one."""
    own = variables()

    @tf.function
    def gradients(is_first: bool) -> Any:
        with hvt.DistributedGradientTape(tf.GradientTape()) as tape:
            value = tf.reduce_sum(own[0]) if is_first else tf.constant(1.0) * tf.reduce_sum(own[1])
        return tape.gradient(value, own)

    with pytest.raises(tf.errors.OpError, match="Mismatched gradients"):
        gradients(comm.rank == 0)
    assert float(gradients(True)[0][0]) == 1.0
