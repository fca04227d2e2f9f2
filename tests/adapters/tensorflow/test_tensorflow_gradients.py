"""Gradients through DistributedGradientTape and GradientReduction: what the contract does not cover, and what
must not be reduced twice."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import multiring.tensorflow as mt
from multiring import Communicator
from multiring.errors import MismatchError, UsageError
from multiring.gradients.options import ReducerOptions
from tests.adapters.horovod.support import refused
from tests.on_ranks import Pool, all_raise, check_fields, on_ranks


@on_ranks(3)
def test_mixed_dtypes_in_a_function(comm: Communicator) -> None:
    dtypes = [tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.float32]
    variables = [tf.Variable(tf.ones([3, k + 1], dtype)) for k, dtype in enumerate(dtypes)]

    @tf.function
    def step(factor: Any) -> Any:
        with mt.DistributedGradientTape(tf.GradientTape(), comm, bucket_bytes=32) as tape:
            loss = tf.add_n([tf.cast(tf.reduce_sum(v), tf.float64) for v in variables]) * factor
        return tape.gradient(loss, variables)

    for number in range(3):
        found = step(tf.constant(comm.rank + number, tf.float64))
        for variable, gradient in zip(variables, found, strict=True):
            assert gradient.dtype == variable.dtype
            np.testing.assert_allclose(tf.cast(gradient, tf.float64), (comm.size - 1) / 2 + number)


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(comm: Communicator, as_dense: bool) -> None:
    """In a function; then eagerly, where rank 0 has none for the table."""
    table, dense = tf.Variable(tf.zeros([5, 2])), tf.Variable(tf.ones([2]))

    def step(rows: Any, **options: Any) -> Any:
        with mt.DistributedGradientTape(tf.GradientTape(), comm, sparse_as_dense=as_dense, **options) as tape:
            loss = tf.reduce_sum(dense)
            if rows is not None:
                loss += tf.reduce_sum(tf.gather(table, rows))
        return tape.gradient(loss, [table, dense])

    found, other = tf.function(step)(tf.constant([comm.rank, 3, 3]))
    assert isinstance(found, tf.IndexedSlices) != as_dense
    wanted = np.zeros((5, 2))
    for rank in range(comm.size):
        np.add.at(wanted, [rank, 3, 3], 1.0 / comm.size)
    np.testing.assert_allclose(tf.convert_to_tensor(found), wanted, rtol=1e-6)
    np.testing.assert_array_equal(other, 1.0)
    found, _ = step([4] if comm.rank == 1 else None, op="sum")
    assert as_dense or found.indices.numpy().tolist() == [4]
    np.testing.assert_array_equal(tf.convert_to_tensor(found), [[0.0] * 2] * 4 + [[1.0] * 2])


@pytest.mark.full
def test_a_tape_forgets_variables_that_are_gone(comm: Communicator) -> None:
    """What was kept for variables that are gone goes when others come; watched tensors work too."""

    def reductions() -> int:
        gc.collect()
        return sum(type(found) is mt.GradientReduction for found in gc.get_objects())

    before = reductions()
    # Made beforehand, since what is made after another was freed may get its place in memory.
    variables = [tf.Variable(tf.ones([number + 1])) for number in range(4)]
    tensors = [tf.ones([number + 1]) for number in range(4)]
    while variables:
        for _ in range(2):
            with mt.DistributedGradientTape(tf.GradientTape(), comm) as tape:
                loss = tf.reduce_sum(variables[-1]) * comm.rank
            tape.gradient(loss, variables[-1])
        with mt.DistributedGradientTape(tf.GradientTape(), comm) as tape:
            tape.watch(tensors[-1])
            loss = tf.reduce_sum(tensors[-1] * tensors[-1]) * comm.rank
        np.testing.assert_allclose(tape.gradient(loss, tensors[-1]), comm.size - 1)
        variables.pop()
        tensors.pop()
        del tape, loss
        assert reductions() <= before + 2


def test_traced_functions_are_freed(comm: Communicator) -> None:
    graphs = []
    for _ in range(2):
        v = tf.Variable([1.0, 2.0])

        @tf.function
        def step(v: Any = v) -> None:
            with mt.DistributedGradientTape(tf.GradientTape(), comm) as tape:
                value = tf.reduce_sum(v * v)
            v.assign_sub(tape.gradient(value, v))
            mt.allreduce(v, name="once", comm=comm)
            mt.allreduce(v, name="once", comm=comm)

        step()
        graphs.append(weakref.ref(step.get_concrete_function().graph))
        del step, v
        gc.collect()
    assert [graph() for graph in graphs] == [None, None]


def test_sources_may_be_nested(comm: Communicator) -> None:
    sources = {"a": tf.Variable(1.0), "b": [tf.Variable(2.0), tf.Variable(3.0)]}
    with mt.DistributedGradientTape(tf.GradientTape(persistent=True), comm) as tape:
        loss = sources["a"] * sources["b"][0] * (2.0 * comm.rank)
    assert not isinstance(tape.gradient(loss, sources)["b"], tf.Tensor)
    found = tape.gradient(loss, sources)
    assert float(found["a"]) == 2.0 * (comm.size - 1)
    assert found["b"][1] is None
    assert tape.watched_variables()


def absent_in_a_function(comm: Communicator) -> None:
    """Traced with a gradient that no rank has; later one rank has it in another trace."""
    used, spare = tf.Variable(1.0), tf.Variable(1.0)

    @tf.function
    def step(with_spare: bool) -> Any:
        with mt.DistributedGradientTape(tf.GradientTape(), comm) as tape:
            loss = used * 2.0 + (spare if with_spare else 0.0)
        return [0.0 if g is None else g for g in tape.gradient(loss, [used, spare])]

    assert [float(g) for g in step(False)] == [2.0, 0.0]
    with mt.translate_errors():
        step(comm.rank == 1)


def test_a_gradient_that_comes_on_one_rank_later_is_reported(ranks: Pool) -> None:
    error = ranks(2).run_expecting_errors(absent_in_a_function)[0]
    assert isinstance(error, UsageError), error
    assert "had no gradient on any rank in the first step" in str(error)


@on_ranks(3)
@all_raise(UsageError, "pass uneven=True")
def test_running_out_of_data_in_a_function_takes_preparation(comm: Communicator) -> None:
    """Also where the last variable's bucket leaves long before the first one's: none waits for another."""
    variables = [tf.Variable(tf.ones([2])), tf.Variable(tf.ones([3]))]
    options = ReducerOptions(bucket_bytes=8)
    reduction = mt.GradientReduction(variables, comm, options)

    def late(value: Any) -> Any:
        time.sleep(0.5 * comm.rank)
        return value

    @tf.function
    def step(factor: Any) -> None:
        first = tf.ensure_shape(tf.py_function(late, [tf.ones([2]) * factor], tf.float32), [2])
        found = reduction.reduce([first, tf.ones([3]) * factor])
        for variable, gradient in zip(variables, found, strict=True):
            variable.assign_sub(gradient)

    try:
        with mt.translate_errors(), reduction.join(variables):
            for number in range(2 + (comm.rank > 0)):
                step(tf.constant(float(comm.rank)))
                assert number < 2, "a step without the data of a rank has passed"
    finally:
        for variable in variables:
            np.testing.assert_allclose(variable, 1.0 - (comm.size - 1), rtol=1e-6)


@all_raise(MismatchError, "'options'")
def test_refused(comm: Communicator) -> None:
    variable = tf.Variable([1.0, 2.0])
    reduction = mt.GradientReduction([variable], comm, ReducerOptions(op="sum"))
    calls = {
        "2 gradients were given for 1": lambda: reduction.reduce([None, None]),
        r"gradient of 'Variable' is float32 \(3,\)": lambda: reduction.reduce([tf.ones([3])]),
        "no parameters": lambda: mt.GradientReduction([], comm),
        "int32 cannot be reduced": lambda: mt.GradientReduction([tf.Variable(1)], comm),
    }
    refused(UsageError, calls)
    mt.GradientReduction([variable], comm, ReducerOptions(op="sum" if comm.rank else "average"))


@all_raise(MismatchError, "'gradients ", "rank 1 submitted it in step 1; rank 0 submitted it in step 2")
def test_a_step_that_failed_on_one_rank_is_a_mismatch(comm: Communicator) -> None:
    """On rank 0 the first step fails when one of its two buckets has been reduced; it then goes on."""
    variables = [tf.Variable(tf.ones([4])), tf.Variable(tf.ones([4]))]
    # Averages of a function that does not expect uneven data come together; here one has to come alone.
    options = ReducerOptions(op="sum", bucket_bytes=16)
    reduction = mt.GradientReduction(variables, comm, options)
    fails = True

    def fail(gradient: Any) -> Any:
        if fails and comm.rank == 0:
            comm.recv(1)
            raise ValueError("no such sample")
        return gradient

    def tell(reduced: Any) -> None:
        if comm.rank == 1:
            comm.send(np.zeros(1), 0)

    @tf.function
    def step(x: Any) -> Any:
        late = tf.ensure_shape(tf.py_function(fail, [x], tf.float32), [4])
        reduced = reduction.reduce([late, x])
        tf.py_function(tell, [reduced[1]], [])
        return reduced

    if comm.rank == 0:
        with pytest.raises(tf.errors.OpError, match="no such sample"):
            step(tf.ones([4]))
        fails = False
    with mt.translate_errors():
        step(tf.ones([4]))


@all_raise(MismatchError, "hidden layer", r"float32\[4\]", r"float32\[5\]")
def test_a_mismatch_in_a_loop_reaches_every_rank(comm: Communicator) -> None:
    variable = tf.Variable(tf.ones([4]), shape=tf.TensorShape(None))

    @tf.function
    def step(x: Any) -> Any:
        y = mt.allreduce(x, name="hidden layer")
        variable.assign_sub(y * 0.0)
        return y

    told = r"multiring error \d+: MismatchError"
    with pytest.raises(tf.errors.FailedPreconditionError, match=told) as caught:
        for number in range(5):
            step(tf.ones([4 + (number == 3 and comm.rank == 1)]))
    with pytest.raises(MismatchError) as eager, mt.translate_errors():
        mt.allreduce(tf.ones([4]), name="hidden layer")
    check_fields(eager.value, comm, "hidden layer")
    try:
        with mt.translate_errors():
            raise caught.value
    except MismatchError as error:
        check_fields(error, comm, "hidden layer")
        raise


@pytest.mark.parametrize(
    ("library", "where", "clip"),
    [
        ("keras", "eager", False),
        ("tf_keras", "step", True),
        ("tf_keras", "inner", False),
    ],
)
@all_raise(Exception, "wrap the tape or the optimizer, not both")
def test_wrapping_both_is_refused(comm: Communicator, library: str, where: str, clip: bool) -> None:
    """Tape and optimizer: gradients would be reduced twice."""
    made, variable = (keras, keras.Variable) if library == "keras" else (tf_keras, tf.Variable)
    variables = [variable(np.ones(shape, "float32")) for shape in ((2,), (3, 2))]
    optimizer = mt.DistributedOptimizer(made.optimizers.SGD(0.1), comm, op="sum")
    optimizer.build(variables)

    def gradients(factor: Any) -> Any:
        with mt.DistributedGradientTape(tf.GradientTape(), comm, op="sum") as tape:
            w, table = map(tf.convert_to_tensor, variables)
            loss = tf.reduce_sum(w * factor) + tf.reduce_sum(tf.gather(table, [1]))
        found = tape.gradient(loss, variables)
        if clip:
            found, _ = tf.clip_by_global_norm([tf.convert_to_tensor(g) for g in found], 1.0)
        return found

    compute = tf.function(gradients) if where == "inner" else gradients

    def step(factor: Any) -> None:
        optimizer.apply_gradients(zip(compute(factor), variables, strict=True))

    run = tf.function(step) if where in ("step", "inner") else step
    run(tf.constant(comm.rank + 1.0))


@pytest.mark.parametrize("traced", [False, True])
def test_legal_uses_of_both(comm: Communicator, traced: bool) -> None:
    """A tape for one model and an optimizer for the other, and a penalty on a reduced gradient."""
    one, other = (keras.Variable(np.ones(2, "float32"), name=name) for name in ("one", "other"))
    plain, wrapped = keras.optimizers.SGD(1.0), mt.DistributedOptimizer(keras.optimizers.SGD(1.0), comm)
    plain.build([one])
    wrapped.build([other])

    def local(factor: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(other.value * factor)
        return tape.gradient(loss, [other])

    def step(factor: Any) -> None:
        with mt.DistributedGradientTape(tf.GradientTape(), comm) as tape:
            loss = tf.reduce_sum(one.value * factor)
        reduced = tape.gradient(loss, one)
        plain.apply([reduced], [one])
        wrapped.apply(local(factor * tf.reduce_sum(reduced)), [other])

    def watched(factor: Any) -> Any:
        """Looks at the mean gradient of what the wrapped optimizer trains."""
        with mt.DistributedGradientTape(tf.GradientTape(persistent=True), comm) as tape:
            loss = tf.reduce_sum(other.value * factor)
        mean = tape.gradient(loss, other)
        wrapped.apply(local(factor), [other])
        return mean

    mean = (comm.size + 1) / 2
    factor = tf.constant(comm.rank + 1.0)
    (tf.function(step) if traced else step)(factor)
    np.testing.assert_allclose(one.numpy(), 1.0 - mean)
    np.testing.assert_allclose(other.numpy(), 1.0 - mean * 2 * mean)
    found = (tf.function(watched) if traced else watched)(factor)
    np.testing.assert_allclose(found, [mean, mean])
    np.testing.assert_allclose(other.numpy(), 1.0 - mean * 2 * mean - mean)


@pytest.mark.parametrize("traced", [False, True])
def test_gradients_that_look_like_reduced_ones(comm: Communicator, traced: bool) -> None:
    """Equal on all ranks, a sum of which one term was reduced, and made of those of another variable."""
    variable, rate = (keras.Variable(np.ones(shape, "float32")) for shape in ((2,), ()))
    plain, wrapped = keras.optimizers.SGD(1.0), mt.DistributedOptimizer(keras.optimizers.SGD(1.0), comm)
    plain.build([variable])
    wrapped.build([variable, rate])

    def local(loss: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss()
        return tape.gradient(value, variable)

    def step(factor: Any) -> None:
        with mt.DistributedGradientTape(tf.GradientTape(), comm) as tape:
            loss = tf.reduce_sum(variable.value * factor)
        mean = tape.gradient(loss, variable)
        plain.apply([mean], [variable])
        decay = local(lambda: tf.reduce_sum(variable.value**2) / 4.0)
        wrapped.apply([decay], [variable])
        own = local(lambda: tf.reduce_sum(variable.value * factor))
        wrapped.apply([3.0 * own + mean], [variable])
        wrapped.apply([tf.reduce_sum(mean * mean)], [rate])

    (tf.function(step) if traced else step)(tf.constant(comm.rank + 1.0))
    mean = (comm.size + 1) / 2
    np.testing.assert_allclose(variable.numpy(), (1.0 - mean) / 2 - 4 * mean)
    np.testing.assert_allclose(rate.numpy(), 1.0 - 2 * mean**2)
