"""The ops of the TensorFlow adapter: results, shapes, gradients, order, errors."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import multiring.tensorflow as mt
from multiring import Communicator
from multiring.errors import UsageError
from multiring.tensorflow.graph.library import native_ops
from tests.adapters.horovod.support import refused
from tests.on_ranks import on_ranks
from tests.support import run_job

INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]


def _value_and_gradient(reduce: Any, tensor: Any) -> Any:
    """What `reduce` makes of a tensor, and the gradient of the sum of its real parts."""
    with tf.GradientTape() as tape:
        tape.watch(tensor)
        total = reduce(tensor)
        loss = tf.reduce_sum(tf.math.real(total))
    return total, tape.gradient(loss, tensor)


@on_ranks(3)
def test_reductions(comm: Communicator) -> None:
    own = np.array([[1, 2, 3], [4, 5, 6]])
    for dtype in INTEGERS + FLOATS:
        tensor = tf.cast(own + comm.rank, dtype)
        total = mt.allreduce(tensor, comm=comm)
        assert total.dtype == tensor.dtype
        np.testing.assert_array_equal(tf.cast(total, tf.int64), sum(own + rank for rank in range(comm.size)))
        highest = mt.allreduce(tensor, "max", comm=comm)
        np.testing.assert_array_equal(tf.cast(highest, tf.int64), own + comm.size - 1)
    for dtype in ("complex64", "complex128"):
        tensor = tf.constant(own + 1j * comm.rank, dtype)
        wanted = comm.size * own + 1j * sum(range(comm.size))
        total, gradient = _value_and_gradient(lambda x: mt.allreduce(x, comm=comm), tensor)
        np.testing.assert_array_equal(total, wanted)
        np.testing.assert_array_equal(gradient, comm.size * np.ones_like(wanted))
    flag = tf.constant([True, comm.rank == 0, False])
    np.testing.assert_array_equal(mt.allreduce(flag, "max", comm=comm), [True, True, False])
    np.testing.assert_array_equal(mt.allreduce(flag, "min", comm=comm), [True, comm.size == 1, False])
    third = mt.allreduce(tf.constant(1.0, tf.float64), "average", comm=comm, prescale=1 / 3, postscale=0.1)
    assert float(third) == pytest.approx(1 / 30, rel=1e-15)  # factors have all bits of a double
    for shape in [(0,), (0, 3), (), (1,) * 10 + (2,)]:
        zeros = mt.allreduce(tf.ones(shape), comm=comm)
        assert zeros.shape == shape
        np.testing.assert_array_equal(zeros, np.full(shape, comm.size))


@on_ranks(1, 3)
def test_other_ops(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    rows = tf.fill([rank, 2], rank)  # rank 0 has none
    np.testing.assert_array_equal(mt.allgather(rows, comm=comm)[:, 0], np.repeat(range(size), range(size)))
    np.testing.assert_array_equal(mt.allgather(tf.constant(rank), comm=comm), range(size))
    root = size - 1
    np.testing.assert_array_equal(mt.broadcast(tf.fill([2, 2], rank), root, comm=comm), np.full((2, 2), root))
    whole = np.arange(2 * (size + 1)).reshape(size + 1, 2)
    block = mt.reducescatter(tf.constant(whole), comm=comm)
    np.testing.assert_array_equal(block, np.array_split(whole * size, size)[rank])
    even = mt.alltoall(tf.constant(whole + 100 * rank), comm=comm)
    expected = np.concatenate([np.array_split(whole + 100 * r, size)[rank] for r in range(size)])
    np.testing.assert_array_equal(even, expected)
    received, counts = mt.alltoall(tf.fill([size * rank], rank), [rank] * size, comm=comm)
    np.testing.assert_array_equal(counts, range(size))
    np.testing.assert_array_equal(received, np.repeat(range(size), range(size)))


def test_shapes_are_inferred(comm: Communicator) -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 3]), tf.TensorSpec([]), tf.TensorSpec(None)])
    def trace(rows: Any, scalar: Any, unknown: Any) -> None:
        assert mt.allreduce(rows, comm=comm).shape.as_list() == [None, 3]
        assert mt.broadcast(scalar, comm=comm).shape.as_list() == []
        assert mt.allgather(tf.ones([4, 3]), comm=comm).shape.as_list() == [None, 3]
        assert mt.allgather(scalar, comm=comm).shape.as_list() == [None]
        assert mt.allgather(unknown, comm=comm).shape.rank is None
        assert mt.reducescatter(rows, comm=comm).shape.as_list() == [None, 3]
        received, counts = mt.alltoall(rows, [1] * comm.size, comm=comm)
        assert received.shape.as_list() == [None, 3]
        assert counts.shape.as_list() == [None]
        with pytest.raises(ValueError, match="at least rank 1"):
            mt.reducescatter(scalar, comm=comm)

    trace.get_concrete_function()


@on_ranks(3)
def test_gradients(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    x = tf.Variable(tf.range(1.0, 2.0 * size + 1) * (rank + 1))
    weight = tf.range(2.0 * size) + 10.0 * rank  # the gradient that comes back, on this rank
    weights = [np.arange(2.0 * size) + 10.0 * r for r in range(size)]

    def of(function: Any, factor: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(function(x.value()) * factor)
        return tape.gradient(loss, x)

    total, long = np.sum(weights, 0), tf.range(2.0 * size * size)
    joined, mine = np.concatenate([w[:2] for w in weights]), slice(2 * rank, 2 * rank + 2)
    cases: list[tuple[Any, Any, Any]] = [
        (lambda v: mt.allreduce(v, comm=comm, prescale=0.5), weight, 0.5 * total),
        (lambda v: mt.allreduce(v, "average", comm=comm), weight, total / size),
        (lambda v: mt.broadcast(v, 1, comm=comm), weight, total if rank == 1 else 0 * total),
        (lambda v: mt.allgather(v, comm=comm), long, size * long[2 * size * rank : 2 * size * (rank + 1)]),
        (lambda v: mt.reducescatter(v, "average", comm=comm, postscale=3.0), weight[:2], joined * 3 / size),
        (lambda v: mt.alltoall(v, comm=comm), weight, np.concatenate([w[mine] for w in weights])),
    ]
    for function, factor, wanted in cases:
        np.testing.assert_allclose(of(function, factor), wanted)
    with pytest.raises((UsageError, LookupError), match="only 'sum' and 'average'"):
        of(lambda v: mt.allreduce(v, "max", comm=comm), weight)


def test_the_gradient_of_a_broadcast_in_a_session(comm: Communicator) -> None:
    """Zeros of a known shape are a constant: a session must not skip the allreduce the root waits for."""
    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        x = tf.constant([1.0, 2.0])
        shared = mt.broadcast(x, root=0, comm=comm)
        (gradient,) = tf.compat.v1.gradients(shared * (comm.rank + 1.0), [x])
        # On another rank than the root nothing but the zeros is asked for.
        expected = [3.0, 3.0] if comm.rank == 0 else [0.0, 0.0]
        assert session.run(gradient).tolist() == expected


@on_ranks(3)
def test_ranks_may_issue_operations_in_any_order(comm: Communicator) -> None:
    """Ranks issue the same names in different orders, many at once, and one whose result nobody wants."""
    order = np.random.default_rng(comm.rank).permutation(20)

    @tf.function
    def many(x: Any) -> Any:
        results: dict[int, Any] = {}
        for number in order:
            results[number] = mt.allreduce(x * float(number), name=f"number {number}", comm=comm)
        mt.allreduce(x, name="unused", comm=comm)
        return [results[number] for number in range(20)], x * 1.0

    for _ in range(5):
        found, same = many(tf.ones([3]))
        np.testing.assert_array_equal([value[0] for value in found], np.arange(20.0) * comm.size)
        np.testing.assert_array_equal(same, 1.0)  # no result went to memory that is still in use


def test_names_survive_loops_and_retracing(comm: Communicator) -> None:
    """Names without a given one: in a loop, and in a function that one rank traces more often."""

    @tf.function(reduce_retracing=False)
    def mean(x: Any) -> Any:
        total = tf.constant(0.0)
        for _ in tf.range(3):
            total += mt.allreduce(tf.reduce_sum(x), comm=comm)
        return total + mt.allreduce(1.0, comm=comm)

    for step in range(3):
        rows = 2 if step == 2 and comm.rank == 1 else 1
        assert float(mean(tf.ones([rows]))) == 3 * (comm.size + (step == 2)) + comm.size


@pytest.mark.parametrize("sizes", [[[4, 1, 4], [1, 0]], [[], [5]], [[], []]])
def test_sparse_tensors(comm: Communicator, sizes: list[list[int]]) -> None:
    rows = sizes[comm.rank]
    values = tf.reshape(tf.range(2.0 * len(rows)), (len(rows), 2)) + 1.0
    dense = [np.zeros((6, 2), np.float32) for _ in sizes]
    for r, mine in enumerate(sizes):
        np.add.at(dense[r], mine, np.arange(2.0 * len(mine)).reshape(len(mine), 2) + 1.0)
    found = mt.allreduce(
        tf.IndexedSlices(values, tf.constant(rows, tf.int32), tf.constant([6, 2])), "average", comm=comm
    )
    assert found.indices.dtype == tf.int32
    np.testing.assert_array_equal(found.indices, sorted({row for mine in sizes for row in mine}))
    np.testing.assert_allclose(tf.convert_to_tensor(found), np.mean(dense, 0), rtol=1e-6)
    assert len(set(comm.allgather_object(found.values.numpy().tobytes()))) == 1


def test_refused(comm: Communicator) -> None:
    invalid = tf.errors.InvalidArgumentError
    alltoall = functools.partial(mt.alltoall, tf.ones([3]), name="a", comm=comm)
    refused(UsageError, {"op is 'mean'": lambda: mt.allreduce(1.0, "mean", comm=comm)})  # type: ignore[arg-type]
    calls = {
        "at least rank 1|is a scalar": lambda: mt.reducescatter(tf.constant(1.0), comm=comm),
        r"UsageError: splits of 'a' .* 2 numbers .* 3 rows": lambda: alltoall([1, 1]),
    }
    refused(invalid, calls)
    with pytest.raises(UsageError, match="splits of 'a'"), mt.translate_errors():
        alltoall([-1, 4])
    with pytest.raises((TypeError, ValueError, invalid)):
        mt.allreduce(tf.constant("text"), comm=comm)
    # A graph of another process.
    allgather = native_ops().multiring_allgather
    with pytest.raises(tf.errors.FailedPreconditionError, match="'x' belongs to communicator 12345"):
        allgather(1.0, [], communicator=12345, tensor_name="x")
    assert float(mt.allreduce(1.0, comm=comm)) == comm.size


WAITING = """
import ctypes
import tensorflow as tf
import multiring, multiring.tensorflow as mt
from multiring.tensorflow.graph import library

comm = multiring.init()
found = library._library()
assert found.is_asynchronous
found.native.multiring_tensorflow_wait_in_compute()
found.is_asynchronous = False

@tf.function
def many(x):
    return [mt.allreduce(x * k, comm=comm) for k in range(40)], mt.allgather(x, comm=comm)

sums, joined = many(tf.ones([5]))
assert [float(value[0]) for value in sums] == [2.0 * k for k in range(40)]
assert joined.shape == [10]
"""


def test_it_works_where_done_cannot_be_moved() -> None:
    """More operations than TensorFlow has threads, each of which holds one while it waits."""
    run_job(2, WAITING, timeout=120.0, code=0)


WITH_A_GPU = """
import tensorflow as tf
real = tf.config.get_visible_devices
tf.config.get_visible_devices = lambda kind=None: ["one"] if kind == "GPU" else real(kind)
tf.config.set_soft_device_placement(False)
import multiring
import multiring.tensorflow as mt

comm = multiring.init()
x = tf.Variable([1.0, 2.0])

@tf.function
def compiled(x):
    with tf.device("GPU:0"):
        return mt.allreduce(x, name="compiled")

for _ in range(2):
    with tf.GradientTape() as tape:
        squares = x * x
        with tf.device("GPU:0"):
            y = mt.allreduce(squares, name="eager")
    found = [y, compiled(tf.constant([1.0, 4.0])), tape.gradient(y, x) / x]
    assert [each.numpy().tolist() for each in found] == [[2.0, 8.0], [2.0, 8.0], [4.0, 4.0]]
    assert all(each.device.endswith("CPU:0") for each in found)
"""


def test_operations_run_on_the_host_beside_a_gpu() -> None:
    """In the scope of a device that TensorFlow is told to have, and without soft placement: else that would
    refuse them."""
    ended = run_job(2, WITH_A_GPU, code=0, timeout=120)
    assert (ended.stdout + ended.stderr).count("TensorFlow has a GPU") == 1
