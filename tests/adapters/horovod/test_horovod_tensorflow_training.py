"""Tapes, optimizers and sessions of the TensorFlow face, beside one process that has the whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import multiring.horovod.tensorflow as hvd
from multiring import Communicator
from tests.adapters.horovod.support import with_hvd
from tests.on_ranks import same_everywhere

tf1 = tf.compat.v1
ROWS = 4  # of each rank
STEPS = 6
RATE = 1 / 64  # optimizers of TensorFlow 1 keep it as a float32


def data(size: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(7)
    x = rng.normal(size=(size * ROWS, 3))
    return x, x @ np.array([[1.0], [-2.0], [0.5]]) + 0.1


def weights() -> list[Any]:
    return [tf.Variable(np.full((3, 1), 0.2)), tf.Variable(np.zeros(1))]


def loss_of(own: list[Any], x: Any, y: Any) -> Any:
    return tf.reduce_mean((x @ own[0] + own[1] - y) ** 2)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "predivide": {"gradient_predivide_factor": 2.0},
    "groups": {"num_groups": 2},
    "sum": {"op": hvd.Sum},
}


@pytest.mark.parametrize("in_function", [False, True])
@with_hvd
def test_tapes(comm: Communicator, in_function: bool) -> None:
    x, y = data(comm.size)
    mine = slice(comm.rank * ROWS, (comm.rank + 1) * ROWS)
    for what, options in OPTIONS.items():
        own, reference = weights(), weights()

        def step() -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(own, x[mine], y[mine])  # noqa: B023
            tape = hvd.DistributedGradientTape(tape, **options)  # noqa: B023
            assert isinstance(tape, tf.GradientTape)
            return tape.gradient(loss, own)  # noqa: B023

        run = tf.function(step) if in_function else step
        for _ in range(STEPS):
            with tf.GradientTape() as alone:
                loss = loss_of(reference, x, y)
            factor = comm.size if what == "sum" else 1
            for variable, gradient in zip(reference, alone.gradient(loss, reference), strict=True):
                variable.assign_sub(0.01 * factor * gradient)
            for variable, gradient in zip(own, run(), strict=True):
                variable.assign_sub(0.01 * gradient)
        for one, other in zip(own, reference, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12)
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, gradient_predivide_factor=2.0)


@with_hvd
def test_local_sources_sparse_gradients_and_adasum(comm: Communicator) -> None:
    table, kernel, unused = tf.Variable(tf.ones([4, 2])), tf.Variable(1.0), tf.Variable(1.0)

    def gradients(**options: Any) -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape(), **options) as tape:
            rows = tf.gather(table, [comm.rank, 3])
            loss = tf.reduce_sum(rows) * (comm.rank + 1.0) + kernel * (2.0 - comm.rank)
        tape.register_local_source(kernel)
        return tape.gradient(loss, [table, kernel, unused])

    sparse, local, missing = gradients()
    assert isinstance(sparse, tf.IndexedSlices)
    assert missing is None
    expected = [[0.5] * 2, [1.0] * 2, [0.0] * 2, [1.5] * 2]
    np.testing.assert_allclose(tf.convert_to_tensor(sparse), expected)
    assert float(local) == (2.0 - comm.rank) / 2
    dense, local, _ = gradients(sparse_as_dense=True, scale_local_gradients=False)
    np.testing.assert_allclose(dense, expected)
    assert float(local) == 2.0 - comm.rank
    orthogonal = hvd.allreduce(tf.one_hot(comm.rank, 2), op=hvd.Adasum)
    np.testing.assert_allclose(orthogonal, [1.0, 1.0])


@pytest.mark.parametrize("what", ["plain", "averaged passes", "adasum"])
@with_hvd
def test_optimizers_of_tensorflow_1(comm: Communicator, what: str) -> None:
    """In a monitored session, from the values of rank 0; what each step gives is NumPy's."""
    options = {
        "plain": {"name": "Named", "use_locking": True},
        "averaged passes": {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
        "adasum": {"op": hvd.Adasum},
    }[what]
    x, y = data(comm.size)
    with tf.Graph().as_default():
        inputs, labels = tf1.placeholder(tf.float64, [None, 3]), tf1.placeholder(tf.float64, [None, 1])
        kernel = tf1.get_variable("kernel", initializer=np.full((3, 1), 0.2 + comm.rank))
        count = tf1.train.get_or_create_global_step()
        loss = tf.reduce_mean((inputs @ kernel - labels) ** 2)
        optimizer = hvd.DistributedOptimizer(tf1.train.MomentumOptimizer(RATE, 0.5), **options)
        train = optimizer.minimize(loss, global_step=count)
        average = hvd.allreduce(loss, name="loss")
        assert optimizer.get_slot_names() == ["momentum"]
        mine = slice(comm.rank * ROWS, (comm.rank + 1) * ROWS)
        hooks = [hvd.BroadcastGlobalVariablesHook(0)]
        with tf1.train.MonitoredTrainingSession(hooks=hooks) as session:
            start = session.run(kernel)
            for _ in range(STEPS):
                session.run([train, average], {inputs: x[mine], labels: y[mine]})
            found = session.run(kernel)
    np.testing.assert_array_equal(start, np.full((3, 1), 0.2))
    assert same_everywhere(comm, found.tolist())
    if what == "adasum":
        assert np.abs(x @ found - y).mean() < np.abs(x @ start - y).mean()
        return
    steps = STEPS if what == "plain" else STEPS // 2
    expected, momentum = start.copy(), np.zeros((3, 1))
    for _ in range(steps):
        gradient = 2 * x.T @ (x @ expected - y) / len(x)
        momentum = 0.5 * momentum + gradient
        expected -= RATE * momentum
    np.testing.assert_allclose(found, expected, rtol=1e-10)


@with_hvd
def test_batch_normalisation_over_all_ranks(comm: Communicator) -> None:
    whole = tf.random.stateless_normal([8, 3], [1, 2]) * 3 + 100
    factors = tf.random.stateless_normal([8, 3], [3, 4])
    mine = slice(0, 2) if comm.rank == 0 else slice(2, 8)
    layer, reference = hvd.SyncBatchNormalization(), tf.keras.layers.BatchNormalization()
    own, all_of_it = tf.Variable(whole[mine]), tf.Variable(whole)
    with tf.GradientTape(persistent=True) as tape:
        out = layer(own, training=True)
        expected = reference(all_of_it, training=True)
        loss, other = tf.reduce_sum(out * factors[mine]), tf.reduce_sum(expected * factors)
    np.testing.assert_allclose(out, expected[mine], atol=1e-4)
    np.testing.assert_allclose(tape.gradient(loss, own), tape.gradient(other, all_of_it)[mine], atol=1e-4)
    np.testing.assert_allclose(layer.moving_variance, reference.moving_variance, rtol=1e-4)


@with_hvd
def test_state_is_restored(comm: Communicator) -> None:
    variable = tf.Variable(float(comm.rank))
    state = hvd.elastic.TensorFlowState([variable], step=comm.rank)
    seen = []

    @hvd.elastic.run
    def train(state: Any) -> str:
        seen.append((float(variable), state.step))
        while state.step < 4:
            variable.assign_add(1.0)
            state.step += 1
            if state.step == 2:
                state.commit()
            if state.step == 3 and len(seen) == 1:
                tf.function(lambda: hvd.allreduce(tf.ones([2 + comm.rank]), name="differs"))()
        return "done"

    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    assert train(state) == "done"
    assert seen == [(0.0, 0), (2.0, 2)]
    assert resets == [2]
    state.on_hosts_updated(1.0, 1)
    with pytest.raises(hvd.elastic.HostsUpdatedInterrupt):
        state.check_host_updates()
