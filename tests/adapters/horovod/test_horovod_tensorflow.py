"""Collectives of the TensorFlow face, without a graph, in functions and in sessions, beside NumPy."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import multiring.horovod.tensorflow as hvd
import multiring.horovod.tensorflow.keras as hvk
import multiring.tensorflow
from multiring import Communicator
from multiring.errors import UsageError
from tests.adapters.horovod.support import refused, with_hvd
from tests.on_ranks import on_ranks, same_everywhere

Run = Callable[[Callable[[], Any]], Any]


def in_session(make: Callable[[], Any]) -> Any:
    with tf.Graph().as_default():
        made = make()
        with tf.compat.v1.Session() as session:
            return session.run(made)


WAYS: dict[str, Run] = {
    "at once": lambda make: make(),
    "function": lambda make: tf.function(make)(),
    "session": in_session,
}


@with_hvd(3)
@pytest.mark.parametrize("way", WAYS)
def test_what_each_gives(comm: Communicator, way: str) -> None:
    rank, size = comm.rank, comm.size
    base, total, every = np.arange(6, dtype="float32"), sum(range(1, size + 1)), range(size)
    x, rows = base * (rank + 1), np.full((rank + 1, 2), rank)
    all_rows = np.concatenate([np.full((r + 1, 2), r) for r in every])
    all_x = np.concatenate([base * (r + 1) for r in every])
    given, splits = np.full(size * (rank + 1), rank), [rank + 1] * size
    exchanged = np.concatenate([np.full(r + 1, r) for r in every])
    sums = [base * total, np.array([sum(every)])]
    share = np.full((2 if rank == 0 else 1, 2), size)
    place = [hvd.size_op, hvd.rank_op, hvd.local_size_op, hvd.process_set_included_op]
    cases: list[tuple[Callable[[], Any], Any]] = [
        (lambda: hvd.allreduce(x), base * total / size),
        (lambda: hvd.allreduce(x, average=False), base * total),
        (lambda: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), base * total * 2),
        (lambda: hvd.allreduce(x.astype("int32"), postscale_factor=1.5), (base * total * 1.5 / size) // 1),
        (lambda: hvd.allreduce(rank, op=hvd.Max), size - 1),
        (lambda: hvd.allreduce(x, compression=hvd.Compression.fp16), base * total / size),
        (lambda: hvd.grouped_allreduce([x, np.array([rank])], op=hvd.Sum), sums),
        (lambda: hvd.allgather(rows), all_rows),
        (lambda: hvd.grouped_allgather([rows, x]), [all_rows, all_x]),
        (lambda: hvd.broadcast(x, size - 1, name="named"), base * size),
        (lambda: hvd.reducescatter(tf.ones([size + 1, 2]), op=hvd.Sum), share),
        (lambda: hvd.alltoall(np.full(size, rank)), np.arange(size)),
        (lambda: hvd.alltoall(given, splits), [exchanged, np.arange(size, dtype=np.int32) + 1]),
        (lambda: [number() for number in place], [size, rank, size, 1]),
        (lambda: hvd.allreduce(tf.ones([2], tf.bfloat16), op=hvd.Sum), np.full(2, size)),
    ]
    found = WAYS[way](lambda: [call() for call, _ in cases])
    for mine, (_, right) in zip(found, cases, strict=True):
        for one, other in zip(tf.nest.flatten(mine), tf.nest.flatten(right), strict=True):
            np.testing.assert_allclose(np.asarray(one, np.float64), other, rtol=1e-3)
    assert np.asarray(found[12][1]).dtype == np.int32


@with_hvd(3)
def test_gradients(comm: Communicator) -> None:
    """As the table of Horovod's API has them, which the torch face has as well."""
    rank, size = comm.rank, comm.size
    weight, mean = float(rank + 1), sum(range(1, size + 1)) / size
    ranks, whole = (np.arange(size) + 1.0)[:, None], np.ones((size, 2))
    cases: list[tuple[Callable[[Any], Any], Any]] = [
        (hvd.allreduce, mean),
        (lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=3.0), mean * size * 3),
        (lambda x: hvd.grouped_allreduce([x, x], op=hvd.Sum)[1], mean * size),
        (hvd.allgather, mean),
        (lambda x: hvd.broadcast(x, 1), mean if rank == 1 else 0.0),
        (lambda x: hvd.alltoall(x * weight), ranks * weight),
        (lambda x: hvd.reducescatter(x, op=hvd.Sum), ranks * size),
        (hvd.reducescatter, ranks),
    ]

    @tf.function
    def gradients() -> list[Any]:
        x = tf.ones([size, 2])
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            losses = [tf.reduce_sum(call(x)) * weight for call, _ in cases]
        return [tape.gradient(loss, x) for loss in losses]

    for number, (mine, (_, right)) in enumerate(zip(gradients(), cases, strict=True)):
        np.testing.assert_allclose(mine, whole * right, rtol=1e-6, err_msg=str(number))


@pytest.mark.parametrize("op", ["Min", "Max", "Product"])
@with_hvd()
def test_reductions_without_a_gradient(comm: Communicator, op: str) -> None:
    x = tf.Variable([1.0 + comm.rank])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(hvd.allreduce(x, op=getattr(hvd, op)))
    with pytest.raises(NotImplementedError, match=f"op={op.lower()}"):
        tape.gradient(loss, x)


@with_hvd(3)
def test_gradients_of_gathered_rows(comm: Communicator) -> None:
    """Each rank's rows have the gradients that all ranks have of them."""
    weights = tf.constant([[float(k)] for k in range(6)])

    def gradient(op: int) -> Any:
        values = tf.ones([comm.rank + 1, 2])
        with tf.GradientTape() as tape:
            tape.watch(values)
            reduced = hvd.allreduce(tf.IndexedSlices(values, tf.range(comm.rank + 1)), op=op)
            loss = tf.reduce_sum(reduced.values * weights) * (comm.rank + 1.0)
        return tape.gradient(loss, values)

    first = sum(range(comm.rank + 1))
    wanted = np.repeat(weights.numpy()[first : first + comm.rank + 1], 2, axis=1)
    for way in (gradient, tf.function(gradient)):
        np.testing.assert_allclose(way(hvd.Sum), wanted * 6, rtol=1e-6)
        np.testing.assert_allclose(way(hvd.Average), wanted * 2, rtol=1e-6)


@with_hvd(3)
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
    calls = {
        "not supported with tf.IndexedSlices": lambda: hvd.allreduce(slices, prescale_factor=2.0),
        "has to be hvd.Average or hvd.Sum": lambda: hvd.allreduce(slices, op=hvd.Max),
    }
    refused(NotImplementedError, calls)


@with_hvd(3)
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


@with_hvd(3)
@pytest.mark.parametrize("way", WAYS)
def test_a_mismatch_fails_on_all_ranks_and_the_job_goes_on(comm: Communicator, way: str) -> None:
    def differ() -> Any:
        return [hvd.allreduce(tf.ones([3 + comm.rank]), name="a"), hvd.allreduce(tf.ones([2]), name="b")]

    def fit() -> Any:
        return hvd.allreduce(tf.ones([5]), op=hvd.Sum, name="a")

    for _ in range(2):
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"Mismatched allreduce tensor shapes"):
            WAYS[way](differ)
        np.testing.assert_array_equal(WAYS[way](fit), np.full(5, comm.size))
    for splits in ([1] * comm.size, [4.0 / comm.size] * comm.size, [np.inf] * comm.size):
        with pytest.raises(tf.errors.InvalidArgumentError, match="splits"):
            WAYS[way](lambda splits=splits: hvd.alltoall(tf.ones([4]), splits))
    if way == "at once":
        refused(hvd.HorovodInternalError, {"root": lambda: hvd.broadcast(tf.ones([2]), comm.rank % 2)})
        refused(ValueError, {"not supported": lambda: hvd.allreduce(tf.constant([True]))})
        masked: Any = np.ma.MaskedArray(np.ones(2), mask=[False, True])
        for call in (hvd.allreduce, hvd.allgather, hvk.allreduce, multiring.tensorflow.allreduce):
            with pytest.raises((UsageError, ValueError), match="is masked"):
                call(masked)


@with_hvd(3)
def test_process_sets_and_join(comm: Communicator) -> None:
    pair = hvd.add_process_set([0, 2])
    reduce = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=pair))
    if pair.included():
        assert float(reduce(tf.constant(float(comm.rank)))) == 2.0
        assert hvd.broadcast(tf.constant(comm.rank), 2, process_set=pair).numpy() == 2
    else:
        for kind in (ValueError, tf.errors.InvalidArgumentError):
            refused(kind, {"not part of": lambda: hvd.allreduce(tf.ones(2), process_set=pair)})
            refused(kind, {"not part of": lambda: hvd.broadcast(1, 0, process_set=pair)})
            refused(kind, {"not part of": lambda: hvd.allgather_object(1, process_set=pair)})
    assert hvd.remove_process_set(pair)
    step = tf.function(lambda x: hvd.allreduce(x, name="step"))
    for _ in range(comm.rank + 1):
        step(tf.ones([2]))
    last = tf.function(hvd.join)() if comm.rank == 0 else hvd.join()
    assert int(last) == 2
    assert float(hvd.allreduce(tf.constant(3.0))) == 3.0


@on_ranks(3)
def test_functions_outlive_the_job(comm: Communicator) -> None:
    """What was traced before shutdown runs after init."""
    reduce = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
    for _ in range(3):
        hvd.init()
        assert float(reduce(tf.constant(1.0))) == 3.0
        hvd.shutdown()
    text = "not been initialized"
    refused(tf.errors.InvalidArgumentError, {text: lambda: reduce(tf.constant(1.0))})
    refused(ValueError, {text: lambda: hvd.allreduce(1.0)})


@on_ranks(3)
def test_functions_outlive_a_job_of_another_size(comm: Communicator) -> None:
    """Sizes and ranks are those of the job in which a function runs."""

    def gradient_of(collective: Callable[[Any], Any]) -> Any:
        @tf.function
        def run(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.reduce_sum(collective(x))
            return tape.gradient(y, x)

        return run

    mean = tf.function(lambda x: hvd.allreduce(tf.IndexedSlices(x, [0], [3, 2])).values)
    scattered = gradient_of(lambda x: hvd.reducescatter(x, op=hvd.Sum))
    gathered, sent = gradient_of(hvd.allgather), gradient_of(lambda x: hvd.broadcast(x, 0))
    for ranks in ([0, 1, 2], [1] if comm.rank == 1 else [0, 2], [0, 1, 2]):
        hvd.init(comm=ranks)
        size = len(ranks)
        np.testing.assert_allclose(mean(tf.ones([1, 2])), np.full((size, 2), 1 / size), rtol=1e-6)
        np.testing.assert_array_equal(scattered(tf.ones([6])), np.full(6, size))
        np.testing.assert_array_equal(gathered(tf.ones([1])), [1.0])
        np.testing.assert_array_equal(sent(tf.ones([1])), [float(hvd.rank() == 0)])
        hvd.shutdown()


@on_ranks(2)
def test_functions_made_alone_are_told(comm: Communicator) -> None:
    """They have no reductions in them."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("multiring").addHandler(handler)
    variable = tf.Variable(1.0)

    @tf.function
    def lonely() -> Any:
        with tf.GradientTape() as tape:
            loss = variable * variable
        return hvd.DistributedGradientTape(tape).gradient(loss, [variable])

    for ranks in ([comm.rank], [comm.rank], [0, 1]):
        hvd.init(comm=ranks)
        if len(ranks) == 1:
            lonely()
        hvd.shutdown()
    logging.getLogger("multiring").removeHandler(handler)
    assert len(told) == 1
    assert "lonely: made before this hvd.init()" in told[0]


@with_hvd(3)
def test_operations_of_a_process_set_change_no_names_of_others(comm: Communicator) -> None:
    pair = hvd.add_process_set([0, 2])

    @tf.function
    def run(x: Any) -> Any:
        if pair.included():
            hvd.allreduce(x, process_set=pair)
        return hvd.allreduce(x, op=hvd.Sum)

    assert float(run(tf.constant(1.0))) == 3.0
    hvd.remove_process_set(pair)


@with_hvd(3)
def test_variables_and_objects(comm: Communicator) -> None:
    variables = [tf.Variable([1.0, 2.0 + comm.rank]), tf.Variable(comm.rank, dtype=tf.int64)]
    hvd.broadcast_variables(variables, 1)
    assert [variable.numpy().tolist() for variable in variables] == [[1.0, 3.0], 1]
    assert hvd.broadcast_(variables, 0) == variables
    assert hvd.broadcast_object_fn(1)(comm.rank) == 1
    assert hvd.broadcast_object(comm.rank, 1, None, "object") == 1
    assert hvd.allgather_object(comm.rank, None, "objects") == list(range(comm.size))
    # Programs read and change these.
    assert hvd.broadcast.__defaults__ == (None, False, hvd.global_process_set)
    assert hvd.allreduce.__defaults__[:4] == (None, "", "", hvd.Compression.none)
    assert hvd.broadcast_.__defaults__ == (None, hvd.global_process_set)
    assert same_everywhere(comm, [variable.numpy().tolist() for variable in variables])
    text = "does not support eager execution"
    refused(RuntimeError, {text: lambda: hvd.broadcast_global_variables(0)})
