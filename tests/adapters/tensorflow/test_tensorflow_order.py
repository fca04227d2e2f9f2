"""Uses of one name keep their order, also where ranks reach them in another one.

Each rank delays another use. Were the order not kept, the first of one rank would meet the second of the
other, and the results would be wrong without an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import multiring.tensorflow as mt
from multiring import Communicator
from multiring.errors import AbortedError, UsageError
from tests.on_ranks import on_ranks


def late(x: Any, count: Any) -> Any:
    """`x` after so many products of matrices, in an operation without effects, which nothing orders."""
    x = tf.convert_to_tensor(x)
    step = tf.eye(150) / 2.0
    last = tf.while_loop(lambda k, _: k < count, lambda k, m: (k + 1, m @ step), (0, step))[1]
    return x + tf.cast(tf.reduce_sum(last) * 0.0, x.dtype)


def delays(comm: Communicator) -> tuple[Any, Any]:
    """How late the two uses are: the first on rank 0, the second on the others."""
    return tf.constant(400 if comm.rank == 0 else 1), tf.constant(1 if comm.rank == 0 else 400)


def test_a_persistent_tape(comm: Communicator) -> None:
    w = tf.Variable([1.0, 2.0])

    @tf.function
    def step(n1: Any, n2: Any, factor: Any) -> Any:
        with mt.DistributedGradientTape(tf.GradientTape(persistent=True), comm) as tape:
            l1, l2 = tf.reduce_sum(w) * factor, tf.reduce_sum(100.0 * w) * factor
        return tape.gradient(l1, w, late(1.0, n1)), tape.gradient(l2, w, late(1.0, n2))

    for number in range(4):
        first, second = step(*delays(comm), tf.constant(comm.rank + number + 1.0))
        mean = (comm.size - 1) / 2 + number + 1
        np.testing.assert_allclose([first, second], [[mean] * 2, [100 * mean] * 2])


def test_sync_batch_norm_in_inner_functions(comm: Communicator) -> None:
    """`net(real)` and `net(fake)` with their gradients, in a function inside of another."""
    scale, offset = tf.Variable([2.0, 3.0]), tf.Variable([0.0, 1.0])
    draw = np.random.default_rng(0).standard_normal((4, 4 * comm.size, 2)).astype("float32")
    whole = [draw[0] + 1.0, 7.0 * draw[1] + 7.0, draw[2], draw[3]]  # inputs, and what outputs are weighted by
    mine = [part[4 * comm.rank : 4 * comm.rank + 4] for part in whole]

    @tf.function
    def block(x: Any, count: Any) -> Any:
        return mt.sync_batch_norm(late(x, count), scale, offset, comm=comm)[0]

    net = tf.function(lambda x, count: block(x, count) * 1.0)

    def alone(x: Any, _: Any) -> Any:
        return tf.nn.batch_normalization(x, *tf.nn.moments(x, [0]), offset, scale, 1e-5)

    def gradients(call: Any, parts: Any, n1: Any, n2: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(parts)
            # The products delay the gradients as well.
            real, fake = late(call(parts[0], n1) * parts[2], n1), late(call(parts[1], n2) * parts[3], n2)
            loss = tf.reduce_sum(real) + tf.reduce_sum(fake)
        return tape.gradient(loss, [*parts[:2], scale, offset])

    wanted = gradients(alone, [tf.constant(part) for part in whole], 0, 0)
    for run in (tf.function(gradients), gradients):
        found = run(net, [tf.constant(part) for part in mine], *delays(comm))
        totals = [mt.allgather(each, comm=comm) for each in found[:2]]
        totals += [mt.allreduce(each, comm=comm) for each in found[2:]]
        for one, other in zip(totals, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-4)


def test_uses_of_one_name(comm: Communicator) -> None:
    """Two operations of one name, and in between a function that uses the name again, captures a variable,
    and has been traced before, on its own."""
    w = tf.Variable(2.0)

    @tf.function
    def inner(x: Any, count: Any) -> Any:
        return w * mt.allreduce(late(x, count), name="shared", comm=comm)

    @tf.function
    def step(n1: Any, n2: Any) -> Any:
        first = mt.allreduce(late(1.0, n1), name="shared", comm=comm)
        second = inner(tf.constant(10.0), n2)
        third = mt.allreduce(late(100.0, n1), name="shared", comm=comm)
        return first, second, third, inner(tf.constant(1000.0), n2)

    inner(tf.constant(1.0), tf.constant(1))
    for _ in range(4):
        assert [float(value) / comm.size for value in step(*delays(comm))] == [1.0, 20.0, 100.0, 2000.0]


def test_branches_and_loops(comm: Communicator) -> None:
    """Loops whose iterations do not depend on each other, branches, and their gradients."""

    @tf.function
    def step(x: Any, n1: Any, n2: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            results = tf.TensorArray(tf.float32, 6, element_shape=[])
            for k in tf.range(6):
                count = tf.where(k % 2 == 0, n1, n2)
                results = results.write(
                    k, mt.allreduce(late(x * tf.cast(k, tf.float32), count), name="loop", comm=comm)
                )
            found = results.stack()
            if n1 > 0:  # noqa: SIM108  # AutoGraph makes a tf.cond of it
                one = mt.allreduce(late(x, n1), name="branch", comm=comm)
            else:
                one = x
            if n2 > 0:  # noqa: SIM108
                other = mt.allreduce(late(10.0 * x, n2), name="branch", comm=comm)
            else:
                other = x
            loss = tf.reduce_sum(found * tf.range(6.0)) + one + 2.0 * other
        return found, one, other, tape.gradient(loss, x)

    size = comm.size
    for number in range(3):
        x = tf.constant(number + 1.0)
        found, one, other, gradient = step(x, *delays(comm))
        np.testing.assert_allclose(found, np.arange(6.0) * (number + 1) * size)
        assert (float(one), float(other)) == ((number + 1) * size, 10.0 * (number + 1) * size)
        assert float(gradient) == (55.0 + 1.0 + 20.0) * size


@pytest.mark.parametrize("what", ["function in turn", "eager", "reduction in turn"])
def test_one_name_in_two_threads_is_an_error_on_every_rank(comm: Communicator, what: str) -> None:
    """Two threads call one thing, in another order on each rank; one after the other where "in turn"."""
    child = comm.split(0)  # an error breaks it for good
    traced = tf.function(lambda x: mt.allreduce(late(x, 50), name="one name", comm=child))
    w = tf.Variable(0.0)
    reduction = mt.GradientReduction([w], child)
    step = tf.function(lambda x: reduction.reduce([x])[0])
    nested = tf.function(lambda x: tf.cond(x > 0.0, lambda: step(x), lambda: x))
    calls: dict[str, Callable[[Any], Any]] = {
        "function in turn": traced,
        "eager": lambda x: mt.allreduce(x, name="one name", comm=child),
        "reduction in turn": nested,
    }
    errors: list[str] = []
    other_may_end, other_is_done = threading.Event(), threading.Event()

    def work(value: float) -> None:
        try:
            with mt.translate_errors():
                calls[what](tf.constant(value))
        except (UsageError, AbortedError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        other_is_done.set()
        other_may_end.wait(30.0)

    values = [1.0, 100.0] if comm.rank == 0 else [100.0, 1.0]
    workers = [threading.Thread(target=work, args=(value,)) for value in values]
    for worker in workers:
        worker.start()
        if what != "eager":
            assert other_is_done.wait(30.0)
            other_is_done.clear()
    assert what != "eager" or other_is_done.wait(30.0)
    other_may_end.set()
    for worker in workers:
        worker.join()
    assert any("a communicator of its own" in error for error in errors), errors


def test_threads_that_do_not_share_names(comm: Communicator) -> None:
    """A thread takes over from one that has ended; each of two may have a communicator of its own."""
    traced = tf.function(lambda x, c: mt.allreduce(late(x, 50), comm=c))
    totals: dict[float, float] = {}
    first, second = comm.split(0), comm.split(0)
    for child in (first, second):  # the first use is collective, and functions are traced one at a time
        mt.allreduce(1.0, comm=child)

    def work(value: float, c: Communicator) -> None:
        for _ in range(3):
            totals[value] = float(traced(tf.constant(value), c))

    for value in (1.0, 2.0):
        worker = threading.Thread(target=work, args=(value, comm))
        worker.start()
        worker.join()
    both = [threading.Thread(target=work, args=one) for one in ((3.0, first), (4.0, second))]
    for worker in both[:: 1 if comm.rank else -1]:
        worker.start()
    for worker in both:
        worker.join()
    assert totals == {value: value * comm.size for value in (1.0, 2.0, 3.0, 4.0)}


def test_pipelines_of_data_are_refused(comm: Communicator) -> None:
    ready = tf.function(lambda x: mt.allreduce(x, comm=comm))
    ready(tf.constant(1.0))  # traced outside of the pipeline
    for function in (lambda x: mt.allreduce(x, comm=comm), ready):
        for parallel in (None, 4):
            numbers = tf.data.Dataset.from_tensor_slices([1.0, 2.0])
            with pytest.raises(Exception, match="call it outside of the pipeline"):
                numbers.map(function, num_parallel_calls=parallel)


def test_py_functions_of_a_pipeline_do_not_meet_the_main_thread(comm: Communicator) -> None:
    """And may not use a name that is the main thread's."""
    own = comm.split(0)

    def elements(name: str | None) -> Any:
        def element(number: Any) -> Any:
            return mt.allreduce(tf.cast(number, tf.float32) + 100.0, name=name, comm=own)

        numbers = tf.data.Dataset.range(4)
        return numbers.map(lambda k: tf.py_function(element, [k], tf.float32)).prefetch(4)

    for number, found in enumerate(elements(None)):
        assert found.numpy() == comm.size * (100.0 + number)
        assert mt.allreduce(tf.constant(1.0), comm=own).numpy() == comm.size
    mt.allreduce(1.0, name="x", comm=own)
    with pytest.raises(tf.errors.OpError, match="belongs to thread 'MainThread'"):
        next(iter(elements("x")))


@on_ranks(3)
def test_operations_of_some_ranks_change_no_names_of_others(comm: Communicator) -> None:
    part = comm.split(0 if comm.rank != 1 else None)

    @tf.function
    def run(x: Any) -> Any:
        if part is not None:
            mt.allreduce(x, comm=part)
        return mt.allreduce(x, comm=comm)

    assert run(tf.constant(1.0)).numpy() == 3.0


def test_graphs_of_tensorflow_1(comm: Communicator) -> None:
    """Graphs and sessions of TensorFlow 1: names are numbered, and parallel loops are refused."""
    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        n1, n2 = delays(comm)
        found = [mt.allreduce(late(v, n), name="one", comm=comm) for v, n in ((1.0, n1), (100.0, n2))]
        for _ in range(3):
            assert session.run(found) == [comm.size, 100.0 * comm.size]

        def loop(parallel: int) -> Any:
            return tf.compat.v1.while_loop(
                lambda k, _: k < 3,
                lambda k, total: (
                    k + 1,
                    total + mt.allreduce(tf.cast(k, tf.float32), name="loop", comm=comm),
                ),
                (0, 0.0),
                parallel_iterations=parallel,
            )

        tf.compat.v1.disable_control_flow_v2()
        try:
            assert session.run(loop(1)[1]) == 3.0 * comm.size
            with pytest.raises(UsageError, match="parallel_iterations=1"):
                loop(10)
        finally:
            tf.compat.v1.enable_control_flow_v2()


def test_buckets_of_one_step_overlap(comm: Communicator) -> None:
    """With one tape in a step no bucket waits for another, nor for what checks the variables."""
    variables = [tf.Variable(tf.ones([8])) for _ in range(4)]

    @tf.function
    def step(x: Any) -> Any:
        options = {"bucket_bytes": 32}
        with mt.DistributedGradientTape(tf.GradientTape(), comm, **options) as tape:
            loss = tf.add_n([tf.reduce_sum(v * x) for v in variables])
        return tape.gradient(loss, variables)

    graph = step.get_concrete_function(tf.constant(1.0)).graph
    buckets = [op for op in graph.get_operations() if op.type == "MultiringAllreduce"]
    assert len(buckets) == 5  # and the flags
    assert not any(op.control_inputs for op in buckets)
