"""Collectives of the TensorFlow face, without a graph, in functions and in sessions, beside NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import multiring.horovod.tensorflow as hvd
from multiring import Communicator
from tests.adapters.horovod.support import with_hvd
from tests.on_ranks import on_ranks, same_everywhere

Run = Callable[[Callable[[], Any]], Any]


def at_once(make: Callable[[], Any]) -> Any:
    return make()


def in_function(make: Callable[[], Any]) -> Any:
    return tf.function(make)()


def in_session(make: Callable[[], Any]) -> Any:
    with tf.Graph().as_default():
        made = make()
        with tf.compat.v1.Session() as session:
            return session.run(made)


WAYS: dict[str, Run] = {"at once": at_once, "function": in_function, "session": in_session}


@on_ranks(3)
@pytest.mark.parametrize("way", WAYS)
@with_hvd
def test_what_each_gives(comm: Communicator, way: str) -> None:
    rank, size = comm.rank, comm.size

    def calls() -> dict[str, Any]:
        x = tf.range(6.0) * (rank + 1)
        rows = tf.fill([rank + 1, 2], rank)
        exchanged, counts = hvd.alltoall(tf.fill([size * (rank + 1)], rank), [rank + 1] * size)
        return {
            "average": hvd.allreduce(x),
            "old": hvd.allreduce(x, average=False),
            "scaled": hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0),
            "max": hvd.allreduce(tf.constant(rank), op=hvd.Max),
            "fp16": hvd.allreduce(x, compression=hvd.Compression.fp16),
            "group": hvd.grouped_allreduce([x, tf.constant([rank], tf.int64)], op=hvd.Sum),
            "gather": hvd.allgather(rows),
            "gathers": hvd.grouped_allgather([rows, x]),
            "broadcast": hvd.broadcast(x, size - 1, name="named"),
            "scatter": hvd.reducescatter(tf.ones([size + 1, 2]), op=hvd.Sum),
            "even": hvd.alltoall(tf.fill([size], rank)),
            "exchanged": exchanged,
            "counts": counts,
            "place": [hvd.size_op(), hvd.rank_op(), hvd.local_size_op(), hvd.process_set_included_op()],
            "bfloat16": tf.cast(hvd.allreduce(tf.ones([2], tf.bfloat16), op=hvd.Sum), tf.float32),
        }

    found = tf.nest.map_structure(np.asarray, WAYS[way](calls))
    x, ones = np.arange(6.0), sum(range(1, size + 1))
    rows = np.concatenate([np.full((r + 1, 2), r) for r in range(size)])
    expected = {
        "average": x * ones / size,
        "old": x * ones,
        "scaled": x * ones * 2,
        "max": size - 1,
        "fp16": x * ones / size,
        "group": [x * ones, np.array([sum(range(size))])],
        "gather": rows,
        "gathers": [rows, np.concatenate([x * (r + 1) for r in range(size)])],
        "broadcast": x * size,
        "scatter": np.full((2 if rank == 0 else 1, 2), size),
        "even": np.arange(size),
        "exchanged": np.concatenate([np.full(r + 1, r) for r in range(size)]),
        "counts": np.arange(size) + 1,
        "place": [size, rank, size, 1],
        "bfloat16": np.full(2, size),
    }
    assert found["counts"].dtype == np.int32
    for mine, right in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-3)


@on_ranks(3)
@with_hvd
def test_gradients(comm: Communicator) -> None:
    """As the table of Horovod's API has them, which the torch face has as well."""
    rank, size = comm.rank, comm.size
    weight = float(rank + 1)
    mean = sum(range(1, size + 1)) / size

    def calls() -> list[Any]:
        x = tf.ones([size, 2])
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            results = [
                hvd.allreduce(x),
                hvd.allreduce(x, op=hvd.Sum, prescale_factor=3.0),
                hvd.grouped_allreduce([x, x], op=hvd.Sum)[1],
                hvd.allgather(x),
                hvd.broadcast(x, 1),
                hvd.alltoall(x * weight),
                hvd.reducescatter(x, op=hvd.Sum),
                hvd.reducescatter(x),
            ]
            sums = [tf.reduce_sum(result) * weight for result in results]
        return [tape.gradient(total, x) for total in sums]

    found = [np.asarray(gradient) for gradient in in_function(calls)]
    ones = np.ones((size, 2))
    ranks = (np.arange(size) + 1.0)[:, None]
    expected = [
        *(ones * mean, ones * mean * size * 3, ones * mean * size, ones * mean),
        ones * (mean if rank == 1 else 0.0),
        ones * ranks * weight,
        *(ones * ranks * size, ones * ranks),
    ]
    for number, (mine, right) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(mine, right, rtol=1e-6, err_msg=str(number))


@on_ranks(3)
@with_hvd
def test_rows_are_gathered(comm: Communicator) -> None:
    @tf.function
    def reduce(op: int) -> Any:
        values = tf.fill([comm.rank + 1, 2], float(comm.rank + 1))
        slices = tf.IndexedSlices(values, tf.range(comm.rank + 1), tf.constant([5, 2]))
        reduced = hvd.allreduce(slices, op=op)
        return reduced.values, tf.convert_to_tensor(reduced)

    dense = sum(np.pad(np.full((r + 1, 2), r + 1.0), [(0, 4 - r), (0, 0)]) for r in range(comm.size))
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, comm.size)):
        values, whole = reduce(op)
        assert values.shape == (sum(range(1, comm.size + 1)), 2)
        np.testing.assert_allclose(whole, dense / divisor, rtol=1e-6)
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([5, 2]))
    with pytest.raises(NotImplementedError):
        hvd.allreduce(slices, prescale_factor=2.0)
    with pytest.raises(NotImplementedError):
        hvd.allreduce(slices, op=hvd.Max)


@on_ranks(3)
@with_hvd
def test_any_order_in_a_graph(comm: Communicator) -> None:
    """More operations than TensorFlow has threads, which each rank begins in another order."""
    order = np.random.default_rng(comm.rank).permutation(60)
    with tf.Graph().as_default():
        one = tf.compat.v1.placeholder(tf.float32, [])
        results: list[Any] = [None] * 60
        previous = None
        for count, k in enumerate(order):
            with tf.control_dependencies([previous] if previous is not None and count % 3 == 0 else []):
                source = one * float(k)
            results[k] = hvd.allreduce(source, op=hvd.Sum, name=f"t{k}")
            previous = source.op
        options = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)
        with tf.compat.v1.Session(config=options) as session:
            for _ in range(5):
                assert session.run(results, {one: 1.0}) == [3.0 * k for k in range(60)]

    @tf.function
    def chains(x: Any) -> Any:
        ends = []
        for _ in range(8):
            y = x
            for _ in range(4):
                y = hvd.allreduce(y + 1.0)
            ends.append(y)
        for _ in tf.range(3):
            ends[0] = hvd.allreduce(ends[0], op=hvd.Sum)
        return tf.add_n(ends)

    for _ in range(3):
        assert float(chains(tf.constant(0.0))) == 4.0 * 7 + 4.0 * 27


@on_ranks(3)
@pytest.mark.parametrize("way", WAYS)
@with_hvd
def test_a_mismatch_fails_on_all_ranks_and_the_job_goes_on(comm: Communicator, way: str) -> None:
    def differ() -> Any:
        return [hvd.allreduce(tf.ones([3 + comm.rank]), name="a"), hvd.allreduce(tf.ones([2]), name="b")]

    def fit() -> Any:
        return hvd.allreduce(tf.ones([5]), op=hvd.Sum, name="a")

    for _ in range(2):
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"Mismatched allreduce tensor shapes"):
            WAYS[way](differ)
        np.testing.assert_array_equal(WAYS[way](fit), np.full(5, comm.size))
    with pytest.raises(tf.errors.InvalidArgumentError, match="splits"):
        WAYS[way](lambda: hvd.alltoall(tf.ones([4]), [1] * comm.size))
    if way == "at once":
        with pytest.raises(hvd.HorovodInternalError, match="root"):
            hvd.broadcast(tf.ones([2]), comm.rank % 2)
        with pytest.raises(ValueError, match="not supported"):
            hvd.allreduce(tf.constant([True]))


@on_ranks(3)
@with_hvd
def test_process_sets_and_join(comm: Communicator) -> None:
    pair = hvd.add_process_set([0, 2])

    @tf.function
    def reduce(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum, process_set=pair)

    if pair.included():
        assert float(reduce(tf.constant(float(comm.rank)))) == 2.0
        assert hvd.broadcast(tf.constant(comm.rank), 2, process_set=pair).numpy() == 2
    else:
        with pytest.raises(ValueError, match="not part of"):
            hvd.allreduce(tf.ones(2), process_set=pair)
    assert hvd.remove_process_set(pair)

    @tf.function
    def step(x: Any) -> Any:
        return hvd.allreduce(x, name="step")

    for _ in range(comm.rank + 1):
        step(tf.ones([2]))
    last = tf.function(hvd.join)() if comm.rank == 0 else hvd.join()
    assert int(last) == 2
    assert float(hvd.allreduce(tf.constant(3.0))) == 3.0


@on_ranks(3)
def test_functions_outlive_the_job(comm: Communicator) -> None:
    """What was traced before shutdown runs after init."""

    @tf.function
    def reduce(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum)

    for _ in range(3):
        hvd.init()
        assert float(reduce(tf.constant(1.0))) == 3.0
        hvd.shutdown()
    with pytest.raises(tf.errors.InvalidArgumentError, match="not been initialized"):
        reduce(tf.constant(1.0))
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.allreduce(1.0)


@on_ranks(3)
@with_hvd
def test_variables_and_objects(comm: Communicator) -> None:
    variables = [tf.Variable([1.0, 2.0 + comm.rank]), tf.Variable(comm.rank, dtype=tf.int64)]
    hvd.broadcast_variables(variables, 1)
    assert [variable.numpy().tolist() for variable in variables] == [[1.0, 3.0], 1]
    assert hvd.broadcast_(variables, 0) == variables
    assert hvd.broadcast_object({"rank": comm.rank}, 1) == {"rank": 1}
    assert hvd.broadcast_object_fn(1)(comm.rank) == 1
    assert hvd.allgather_object("x" * comm.rank) == ["", "x", "xx"]
    assert same_everywhere(comm, [variable.numpy().tolist() for variable in variables])
    with pytest.raises(RuntimeError, match="does not support eager execution"):
        hvd.broadcast_global_variables(0)
