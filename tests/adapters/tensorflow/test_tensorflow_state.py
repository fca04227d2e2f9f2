"""What has to be the same on all ranks: found out where it is not, and kept so by synchronisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import multiring.tensorflow as mt
from multiring import Communicator
from multiring.errors import MismatchError, UsageError
from multiring.state.check import scope_at
from multiring.tensorflow import callbacks
from multiring.tensorflow.drift import scope_in_graph
from tests.adapters.tensorflow.support import LIBRARIES, loss_of, make_model, share, train
from tests.on_ranks import all_raise, on_ranks, same_everywhere


@all_raise(
    MismatchError,
    "the training state at step 4 differs over ranks",
    "rank 0 with checksum",
    name={"keras": "learning_rate", "tf_keras": "dense.*/kernel"},
)
def test_drift_is_found(comm: Communicator, name: str) -> None:
    """In the fourth step under `fit()`; after the third, rank 1 has changed its model."""
    library = LIBRARIES[name]
    model = make_model(library)
    sgd = library.optimizers.SGD(0.1, momentum=0.9)
    model.compile(mt.DistributedOptimizer(sgd, comm, check_every=5), loss_of(library))

    class Spoil(library.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2 and comm.rank == 1 and library is keras:
                self.model.optimizer.learning_rate = 0.05
            elif batch == 2 and comm.rank == 1:
                self.model.layers[-1].kernel.assign(self.model.layers[-1].kernel + 1e-6)

    with mt.translate_errors():
        train(model, share(comm), Spoil())


def test_a_graph_compares_in_the_same_steps() -> None:
    run = tf.function(scope_in_graph, reduce_retracing=True)
    for every in (1, 3, 7, 100):
        found = [
            int(run(tf.constant(step, tf.int64), tf.constant(every, tf.int64))) for step in range(1, 330)
        ]
        assert found == [scope_at(step, every).value for step in range(1, 330)]


@all_raise(MismatchError, nesterov={False: None, True: "nesterov"})
def test_other_settings_of_the_optimizer_are_found(comm: Communicator, nesterov: bool) -> None:
    w = keras.Variable(np.ones(2, "float32"))
    inner = keras.optimizers.SGD(0.1, momentum=0.9, nesterov=nesterov) if comm.rank else None
    optimizer = mt.DistributedOptimizer(inner or keras.optimizers.SGD(0.1, momentum=0.9), comm)
    optimizer.build([w])
    optimizer.apply([tf.ones([2])])


def samples(rank: int) -> Any:
    return np.random.default_rng(rank).standard_normal((12, 4)).astype("float32") + 3.0 * rank


COMPILED = {"broadcast": {"steps_per_execution": 4}, "average": {"run_eagerly": True}, "local": {}}


@pytest.mark.parametrize("buffers", COMPILED)
def test_moving_statistics(comm: Communicator, buffers: str) -> None:
    """Batch normalisation of the inputs, whose moving mean needs no training to be known."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    normalise = layers.BatchNormalization(momentum=0.9)
    drop = layers.Dropout(0.5, seed=comm.rank)
    model = keras.Sequential([layers.Input((4,)), normalise, drop, layers.Dense(3)])
    model.compile(mt.DistributedOptimizer(keras.optimizers.SGD(0.1), comm), "mse", **COMPILED[buffers])
    validation = samples(9)
    seen: list[Any] = []

    class Look(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append((logs["val_loss"], [w.tobytes() for w in self.model.get_weights()]))

    start = callbacks.BroadcastInitialState(comm=comm, buffers=buffers)  # type: ignore[arg-type]
    x, targets = samples(comm.rank), np.ones((12, 3), "float32")
    train(model, (x, targets), start, Look(), epochs=2, validation_data=(validation, targets))
    means = np.zeros((comm.size, 4))
    for batches in np.split(np.stack([samples(rank) for rank in range(comm.size)]), 4, 1) * 2:
        means = means * 0.9 + batches.mean(1) * 0.1
    wanted = {"broadcast": means[0], "average": np.mean(means, 0), "local": means[comm.rank]}[buffers]
    np.testing.assert_allclose(normalise.moving_mean.numpy(), wanted, rtol=1e-4)
    assert same_everywhere(comm, seen) == (buffers != "local")
    seeds = drop.seed_generator.state.numpy().tolist()
    assert not same_everywhere(comm, seeds), "seeds of random layers are each rank's own"
    if comm.rank == 0:
        model.evaluate(validation, targets, verbose=0)  # no collective
        model.get_weights()


@pytest.mark.parametrize("traced", [False, True])
def test_buffers_are_synchronised_by_hand(comm: Communicator, traced: bool) -> None:
    """In a loop of one's own, for tf_keras and for a `tf.Module`; weights of frozen layers do not travel."""
    layers = tf_keras.layers
    model = tf_keras.Sequential([layers.Input((4,)), layers.BatchNormalization(), layers.Dense(2)])
    model.layers[1].trainable = False
    model.layers[1].kernel.assign(tf.ones([4, 2]) * comm.rank)
    module = tf.Module()
    module.count, module.scale = tf.Variable(comm.rank + 5, trainable=False), tf.Variable(1.0 * comm.rank)

    def step(x: Any) -> None:
        model(x, training=True)
        mt.sync_buffers(model, "average", comm)
        mt.sync_buffers(module, comm=comm)

    run = tf.function(step) if traced else step
    run(tf.constant(samples(comm.rank)))
    means = [samples(rank).mean(0) * 0.01 for rank in range(comm.size)]
    np.testing.assert_allclose(model.layers[0].moving_mean, np.mean(means, 0), rtol=1e-4)
    np.testing.assert_array_equal(model.layers[1].kernel, np.full((4, 2), comm.rank))
    assert (int(module.count), float(module.scale)) == (5, comm.rank)
    with pytest.raises(UsageError, match="buffers is 'mean'"):
        mt.sync_buffers(model, "mean", comm)  # type: ignore[arg-type]


def test_callbacks_decide_alike(comm: Communicator, tmp_path: Path) -> None:
    """Metrics of one rank alone get worse, are the best, or are not numbers; one rank alone has a callback or
    validation data: all ranks do the same, and have the same weights."""
    x = np.ones((6, 4), "float32")

    def fit(targets: Any, *chosen: Any, only: int | None = None, validates: bool = False) -> Any:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile(mt.DistributedOptimizer(keras.optimizers.SGD(1e-3), comm), "mse")
        added = [callbacks.BroadcastInitialState(comm=comm)]
        if only is None or only == comm.rank:
            added = [*chosen, *added]
        validation = (x, targets) if validates else None
        part = x, targets
        history = train(model, part, *added, steps=3, epochs=6, validation_data=validation).history
        end = history["loss"][-1], [weight.tolist() for weight in model.get_weights()]
        return len(history["loss"]), float(model.optimizer.learning_rate), *end

    # The mean of the targets is learnt: rank 0's loss rises, rank 1's falls.
    targets = np.full((6, 1), 0.0 if comm.rank == 0 else 50.0, "float32")
    stop, plateau = keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau
    best = keras.callbacks.ModelCheckpoint(f"{tmp_path}/best.keras", save_best_only=True)
    found = [
        fit(targets, stop("loss", patience=0, start_from_epoch=1)),
        fit(targets, stop("loss", patience=0, mode="max", restore_best_weights=True), only=0),
        fit(targets, plateau("loss", patience=1, min_delta=1e9)),
        fit(targets, plateau("loss", patience=1)),
        fit(targets, plateau("val_loss", patience=1, min_delta=1e9), validates=comm.rank == 0),
        fit(targets, best, only=0, validates=comm.rank == 0),
    ]
    with np.errstate(invalid="ignore"):
        broken = np.where(np.arange(6)[:, None] == 3, np.nan, targets) if comm.rank == 1 else targets
    steps, *_ = fit(broken, keras.callbacks.TerminateOnNaN())
    assert same_everywhere(comm, found), found
    assert found[1][0] < 6, "one rank's decision to stop counts for all"
    assert found[2][1] < 1e-3
    assert found[4][1] < 1e-3
    assert Path(best.filepath).exists()
    assert steps == 1


@all_raise(
    MismatchError,
    "training state at the end of epoch 2",
    what={"rate": "'learning rate' 0.1.* on rank 1", "frozen": "dense.*/kernel'.* on rank 1", "off": None},
)
def test_each_epoch_compares_what_callbacks_change(comm: Communicator, what: str) -> None:
    model = make_model()
    model.layers[0].trainable = False
    every = 0 if what == "off" else 1000
    wrapped = mt.DistributedOptimizer(keras.optimizers.SGD(0.1), comm, check_every=every)
    model.compile(wrapped, loss_of(keras))

    def change(epoch: int, _: Any) -> None:
        if epoch == 1 and comm.rank == 0 and what == "rate":
            model.optimizer.learning_rate = 0.2
        elif epoch == 1 and comm.rank == 0:
            model.layers[0].kernel.assign(model.layers[0].kernel * 2)

    added = [callbacks.BroadcastInitialState(comm=comm), keras.callbacks.LambdaCallback(on_epoch_end=change)]
    train(model, share(comm), *added, steps=1, epochs=4)


@on_ranks(3)
@pytest.mark.parametrize("traced", [False, True])
def test_weights_of_unequal_batches(comm: Communicator, traced: bool) -> None:
    """Batches of 1, 2, 3... samples against the whole batch in one process; the last rank has none."""
    counts = [rank + 1 for rank in range(comm.size - 1)] + [0]
    whole = np.random.default_rng(0).standard_normal((sum(counts), 3)).astype("float32")
    mine = whole[sum(counts[: comm.rank]) : sum(counts[: comm.rank + 1])]
    w = tf.Variable([1.0, -2.0, 0.5])

    def mean_loss(x: Any) -> Any:
        losses = tf.tanh(tf.linalg.matvec(x, w))
        return tf.math.divide_no_nan(tf.reduce_sum(losses), tf.cast(tf.shape(x)[0], tf.float32))

    def step(x: Any) -> Any:
        with mt.DistributedGradientTape(tf.GradientTape(), comm) as tape:
            weight = mt.batch_weight(tf.shape(x)[0] if traced else len(x), comm)
            loss = mean_loss(x) * weight
        return tape.gradient(loss, w)

    with tf.GradientTape() as tape:
        loss = mean_loss(tf.constant(whole))
    run = tf.function(step) if traced else step
    np.testing.assert_allclose(run(tf.constant(mine)), tape.gradient(loss, w), rtol=1e-5)


def test_variables_are_broadcast_in_functions(comm: Communicator) -> None:
    """As Horovod's scripts do it: behind the first step, in the function that is traced for it."""
    model = make_model(seed=comm.rank, normalises=True)
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    others = {
        "half": tf.Variable(tf.fill([2], tf.cast(comm.rank + 1, tf.bfloat16))),
        "complex": tf.Variable(tf.fill([2, 1], tf.complex(1.0, float(comm.rank)))),
        "flag": tf.Variable(comm.rank == 1),
        "step": tf.Variable(comm.rank, dtype=tf.int64),
        "empty": tf.Variable(tf.zeros([0, 3])),
    }

    @tf.function
    def step(x: Any, first_batch: bool) -> Any:
        with mt.DistributedGradientTape(tf.GradientTape(), comm, check_every=0) as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        weights = model.trainable_variables
        sgd.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        if first_batch:
            mt.broadcast_variables(model, 1, comm)
            mt.broadcast_variables(sgd.variables, 1, comm)
            mt.broadcast_variables(others, 1, comm)
        return tf.reduce_sum(model.weights[0])  # what is read later has been broadcast

    x = tf.random.stateless_normal([5, 5], [comm.rank, 0])
    total = step(x, True)
    mine = [variable.numpy() for variable in [*model.weights, *sgd.variables, *others.values(), total]]
    assert same_everywhere(comm, [(value.dtype, value.tobytes()) for value in mine])
    assert others["complex"].numpy()[0, 0] == 1 + 1j
    assert others["half"].numpy().tolist() == [2, 2]
    step(x, False)


@all_raise(MismatchError, kind={"name": r"v float32 \(2, 3\)", "shape": r"w float32 \(3, 2\)"})
def test_unlike_variables_in_functions_are_a_mismatch(comm: Communicator, kind: str) -> None:
    name = "w" if kind == "shape" or comm.rank else "v"
    variable = tf.Variable(tf.zeros([3, 2] if kind == "shape" and comm.rank else [2, 3]))
    with mt.translate_errors():
        tf.function(lambda: mt.broadcast_variables({name: variable}, comm=comm))()


def test_what_cannot_be_broadcast_in_a_graph_is_told(comm: Communicator) -> None:
    with tf.Graph().as_default(), pytest.raises(UsageError, match="grouped_broadcast"):
        mt.broadcast_variables([tf.compat.v1.get_variable("w", [2])], comm=comm)
    text = tf.Variable(["text"])
    with pytest.raises(UsageError, match="'text' cannot be broadcast in a tf.function"):
        tf.function(lambda: mt.broadcast_variables({"text": text}, comm=comm), autograph=False)()
