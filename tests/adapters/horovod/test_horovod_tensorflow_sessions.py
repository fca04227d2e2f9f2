"""Training with optimizers of TensorFlow 1 in its sessions, beside NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import multiring.horovod.tensorflow as hvt
from multiring import Communicator
from tests.adapters.horovod.support import ROWS, samples_of_a_line, with_hvd
from tests.on_ranks import same_everywhere

tf1 = tf.compat.v1
STEPS = 6
RATE = 1 / 64  # optimizers of TensorFlow 1 keep it as a float32


@pytest.mark.parametrize("what", ["plain", "averaged passes", "adasum"])
@with_hvd()
def test_optimizers_of_tensorflow_1(comm: Communicator, what: str) -> None:
    """In a monitored session, from the values of rank 0; what each step gives is NumPy's."""
    options = {
        "plain": {"name": "Named", "use_locking": True},
        "averaged passes": {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
        "adasum": {"op": hvt.Adasum},
    }[what]
    x, y = samples_of_a_line(comm.size)
    with tf.Graph().as_default():
        inputs, labels = tf1.placeholder(tf.float64, [None, 3]), tf1.placeholder(tf.float64, [None, 1])
        kernel = tf1.get_variable("kernel", initializer=np.full((3, 1), 0.2 + comm.rank))
        count = tf1.train.get_or_create_global_step()
        loss = tf.reduce_mean((inputs @ kernel - labels) ** 2)
        optimizer = hvt.DistributedOptimizer(tf1.train.MomentumOptimizer(RATE, 0.5), **options)
        train = optimizer.minimize(loss, global_step=count)
        average = hvt.allreduce(loss, name="loss")
        assert optimizer.get_slot_names() == ["momentum"]
        mine = slice(comm.rank * ROWS, (comm.rank + 1) * ROWS)
        hooks = [hvt.BroadcastGlobalVariablesHook(0)]
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


@pytest.mark.parametrize("is_v2", [False, True])
@with_hvd()
def test_a_loop_in_a_session(comm: Communicator, is_v2: bool) -> None:
    (tf1.enable_control_flow_v2 if is_v2 else tf1.disable_control_flow_v2)()
    try:
        with tf.Graph().as_default(), tf1.Session() as session:
            _, total = tf1.while_loop(
                lambda i, _: i < 4,
                lambda i, total: (i + 1, total + hvt.allreduce(tf.cast(i, tf.float32), op=hvt.Sum)),
                [tf.constant(0), tf.constant(0.0)],
                parallel_iterations=1,
            )
            assert session.run(total) == 6 * comm.size
    finally:
        tf1.enable_control_flow_v2()


@pytest.mark.parametrize("by_reference", [False, True])
@with_hvd()
def test_adasum_in_sessions(comm: Communicator, by_reference: bool) -> None:
    """What a step has changed is combined, also where variables are read by reference."""
    changes = [np.array([1.0, 2.0, 0.0]), np.array([0.0, 1.0, -1.0])]
    with tf.Graph().as_default(), tf1.Session() as session:
        weight = tf1.get_variable("weight", initializer=np.ones(3), use_resource=not by_reference)
        optimizer = hvt.DistributedOptimizer(tf1.train.GradientDescentOptimizer(1.0), op=hvt.Adasum)
        train = optimizer.apply_gradients([(tf.constant(-changes[comm.rank]), weight)])
        session.run(tf1.global_variables_initializer())
        session.run(train)
        found = session.run(weight)
    a, b = changes
    share = [1 - a @ b / (2 * each @ each) for each in (a, b)]
    np.testing.assert_allclose(found, 1 + share[0] * a + share[1] * b, rtol=1e-9)
