"""Training under `fit()` with the callbacks, and the sharding of datasets."""

from __future__ import annotations

import contextlib
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
from multiring.tensorflow import callbacks
from tests.adapters.horovod.support import refused
from tests.adapters.tensorflow.support import assert_same, loss_of, make_distributed, make_model, share, train
from tests.on_ranks import on_ranks, same_everywhere


def state(model: Any) -> list[bytes]:
    variables = [*model.weights, *model.optimizer.variables]
    return [np.asarray(variable.numpy()).tobytes() for variable in variables]


def fit(comm: Communicator, model: Any, *added: Any, **options: Any) -> None:
    """Ranks start with one state and end with one."""
    train(model, share(comm), callbacks.BroadcastInitialState(comm=comm), *added, **options)
    assert_same(comm, model)


def test_state_is_broadcast_and_metrics_are_averaged(comm: Communicator) -> None:
    model = make_distributed(comm)
    assert not same_everywhere(comm, state(model)[:2])
    start = callbacks.BroadcastInitialState(root=1, comm=comm)
    plain = train(model, share(comm), start, epochs=2).history["loss"]
    assert same_everywhere(comm, state(model))
    assert not same_everywhere(comm, plain)
    average = callbacks.MetricAverage(weight=lambda: 1.0 + comm.rank, comm=comm)
    assert same_everywhere(comm, train(model, share(comm), average, epochs=2).history)


def test_a_second_fit_traces_nothing_new(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []

    def sync_buffers(model: Any, *rest: Any) -> None:
        traced.append(model)
        mt.sync_buffers(model, *rest)

    monkeypatch.setattr(callbacks, "sync_buffers", sync_buffers)
    start = callbacks.BroadcastInitialState(comm=comm)
    model, other = make_distributed(comm), make_distributed(comm)
    for each in (model, model, other, other):
        train(each, share(comm), start)
        assert_same(comm, each)
    assert traced == [model, other]
    plain = [make_model(keras, comm.rank) for _ in range(2)]  # without buffers
    for each in plain:
        each.compile(mt.DistributedOptimizer(keras.optimizers.SGD(0.1), comm), loss_of(keras))
        train(each, share(comm), start)
    assert traced[2:] == plain


def rates(comm: Communicator, *added: Any, epochs: int) -> list[float]:
    """The learning rate of every batch."""
    model, found = make_distributed(comm), []

    def record(batch: int, logs: Any) -> None:
        found.append(round(float(model.optimizer.learning_rate), 6))

    fit(comm, model, *added, keras.callbacks.LambdaCallback(on_train_batch_end=record), epochs=epochs)
    return found


def test_learning_rates(comm: Communicator) -> None:
    warmup = callbacks.LearningRateWarmup(0.8, 6, comm=comm)
    decay = callbacks.LearningRateSchedule(0.8, lambda epoch: 0.5 ** (epoch - 1), start_epoch=2)
    start = 0.8 / comm.size
    rising = [round(start + (0.8 - start) * (k + 1) / 6, 6) for k in range(6)]
    assert rates(comm, warmup, decay, epochs=4) == [*rising, 0.8, 0.8, *[0.4] * 4, *[0.2] * 4]
    fine = callbacks.LearningRateSchedule(1.0, lambda epoch: epoch, end_epoch=1, steps_per_epoch=4)
    assert rates(comm, fine, epochs=2) == [0.0, 0.25, 0.5, 0.75, *[0.75] * 4]
    refused(UsageError, {"warm-up of 0 steps": lambda: callbacks.LearningRateWarmup(0.1, 0)})


@pytest.mark.parametrize(("together", "first"), [(4, 0), (3, 0), (1, 1), (2, 1), (1, 9)])
def test_a_warm_up_counts_steps(comm: Communicator, together: int, first: int) -> None:
    """Of all epochs, whatever a call executes; 4 batches an epoch. Afterwards the rate is left alone."""
    found: dict[int, float] = {}
    model = make_distributed(comm, keras.optimizers.SGD(0.3), steps_per_execution=together)
    warmup = callbacks.LearningRateWarmup(0.8, 6, start=0.2, comm=comm)

    class Record(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            found[4 * self.epoch + batch] = round(float(model.optimizer.learning_rate), 6)

    fit(comm, model, warmup, Record(), epochs=first + 3, initial_epoch=first)
    assert len(found) == 3 * -(-4 // together)
    wanted = {k: round(0.2 + 0.6 * min(k + 1, 6) / 6, 6) if first < 2 else 0.3 for k in found}
    assert found == wanted


class Own(keras.Model):  # type: ignore[misc]
    """Has a step of its own that counts no samples."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.scale, self.value = self.add_weight(shape=()), float(comm.rank)

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"own": tf.constant(self.value) + 0.0 * self.scale}


def test_metrics_are_weighted_by_samples(comm: Communicator) -> None:
    """As one process has them over the data of all ranks. The validation data are of one rank alone, or of
    both; a model that counts no samples has plain averages."""
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    model.layers[0].kernel.assign([[1.0]])
    x, y = np.arange(13.0).reshape(13, 1), np.zeros((13, 1))
    mine = slice(0, 4) if comm.rank == 0 else slice(4, 13)
    average = callbacks.MetricAverage(comm=comm)
    options: dict[str, Any] = {"batch_size": 2, "verbose": 0, "shuffle": False, "callbacks": [average]}
    for held_out in ((x[:3], y[:3]), (x[mine], y[mine])):
        everywhere = len(held_out[0]) != 3
        given = held_out if everywhere or comm.rank == 0 else None
        found = model.fit(x[mine], y[mine], validation_data=given, **options).history
        assert found["loss"] == pytest.approx([np.mean(x**2)])
        assert found["mae"] == pytest.approx([np.mean(x)])
        assert found["val_loss"] == pytest.approx([np.mean((x if everywhere else x[:3]) ** 2)])
        assert same_everywhere(comm, found)
    for wrong in (-1.0, float("nan")):
        refused(
            UsageError,
            {"count is": lambda wrong=wrong: callbacks.MetricAverage(wrong, comm).on_epoch_end(0, {})},
        )
    own = Own(comm)
    own.compile()
    assert own.fit(x[mine], **options).history == {"own": [0.5]}


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16", "float16"])
def test_a_checkpoint_of_few_bits(comm: Communicator, tmp_path: Path, policy: str) -> None:
    path = tmp_path / "training.npz"

    def make() -> Any:
        layers = [keras.layers.Input((2,)), keras.layers.Dense(2, dtype=policy)]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        model.compile(mt.DistributedOptimizer(optimizer, comm), "mse", jit_compile=False)
        return model

    x = np.random.default_rng(comm.rank).standard_normal((8, 2))
    start = callbacks.BroadcastInitialState(comm=comm)
    through = make()
    for options in ({"epochs": 1}, {"epochs": 2, "initial_epoch": 1}):
        write = callbacks.RankZeroCheckpoint(path, comm)
        through.fit(x, x, batch_size=4, shuffle=False, verbose=0, callbacks=[start, write], **options)
        comm.barrier()
        later = make()
        assert callbacks.resume(later, path, comm) == options["epochs"]
        assert state(later) == state(through)
    if comm.rank == 0:
        path.write_bytes(path.read_bytes()[:-30])
    comm.barrier()
    refused(UsageError, {"cannot be read": lambda: callbacks.resume(make(), path, comm)})


def test_training_goes_on_from_a_checkpoint_of_rank_0(comm: Communicator, tmp_path: Path) -> None:
    path = tmp_path / "sub" / "training.npz"
    through = make_distributed(comm)
    assert callbacks.resume(through, path, comm) == 0
    fit(comm, through, callbacks.RankZeroCheckpoint(path, comm), epochs=2)
    comm.barrier()
    train(through, share(comm), epochs=4, initial_epoch=2)
    later = make_distributed(comm)
    if comm.rank == 1:
        path = Path("/nowhere")  # only rank 0 reads
    done = callbacks.resume(later, path, comm)
    assert done == 2
    train(later, share(comm), epochs=4, initial_epoch=done)
    assert state(later) == state(through)
    other = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(2)])
    refused(UsageError, {"checkpoint of another model": lambda: callbacks.resume(other, path, comm)})


def plain_schedule(kit: Any) -> Any:
    class Warmup(kit.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc, name-defined]
        def __call__(self, step: Any) -> Any:
            return 0.01 * (tf.cast(step, tf.float32) + 1.0)

    return Warmup()


class WithFunction(keras.optimizers.SGD):  # type: ignore[misc]
    def get_config(self) -> dict[str, Any]:
        odd = {"function": lambda g: g, "layers": {"kernel", "bias", "gamma", "beta"}}
        return super().get_config() | odd


def test_settings_need_not_be_readable(comm: Communicator) -> None:
    fit(comm, make_distributed(comm, keras.optimizers.Adam(plain_schedule(keras))))
    fit(comm, make_distributed(comm, WithFunction(0.1)))
    model = make_distributed(comm, tf_keras.optimizers.Adam(plain_schedule(tf_keras)), tf_keras)
    mt.broadcast_variables(model.weights, comm=comm)
    train(model, share(comm))


class TwoParts(keras.Model):  # type: ignore[misc]
    """Has a step of its own, in which the first part is trained three times; is never called."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.parts = [make_distributed(comm) for _ in range(2)]

    def train_step(self, batch: Any) -> dict[str, Any]:
        for part in [self.parts[0]] * 3 + [self.parts[1]]:
            with tf.GradientTape() as tape:
                value = tf.reduce_mean(part(batch[0]) ** 2)
            weights = part.trainable_variables
            part.optimizer.apply_gradients(zip(tape.gradient(value, weights), weights, strict=True))
        return {"loss": value}


def test_a_model_that_is_built_in_parts_starts_alike(comm: Communicator) -> None:
    model = TwoParts(comm)
    model.compile()
    fit(comm, model)


def test_models_that_are_built_by_their_first_batch(comm: Communicator) -> None:
    """One callback serves several of them; with several steps at once they have to be built before."""
    start = callbacks.BroadcastInitialState(comm=comm)
    for _ in range(2):
        model = make_distributed(comm, lazy=True)
        train(model, share(comm), start)
        assert_same(comm, model)
    model = make_distributed(comm, lazy=True, steps_per_execution=4)
    text = f"rank {comm.rank}: the model has no variables.*build it before fit"
    refused(UsageError, {text: lambda: fit(comm, model)})
    model.build((None, 5))
    fit(comm, model)


def test_numbers_of_layers_are_explained(comm: Communicator) -> None:
    if comm.rank == 0:
        keras.layers.Dense(1)
    model = make_distributed(comm)
    with pytest.raises(MismatchError, match=r"name the layers, or call keras\.utils\.clear_session"):
        fit(comm, model)
    keras.utils.clear_session()
    fit(comm, make_distributed(comm))


def test_epochs_of_different_lengths_are_told(comm: Communicator) -> None:
    """It is no error: a callback of the program may stop all ranks in time."""
    model = make_distributed(comm)

    def stop(batch: int, logs: Any) -> None:
        model.stop_training = batch == 3

    told = pytest.warns(UserWarning, match="4 steps on rank 0 and 6 on rank 1, which waits .* in step 5")
    with told if comm.rank == 0 else contextlib.nullcontext():
        fit(comm, model, keras.callbacks.LambdaCallback(on_train_batch_end=stop), steps=4 + comm.rank)


@on_ranks(1, 3)
def test_shards_of_a_dataset(comm: Communicator) -> None:
    size, rank = comm.size, comm.rank
    numbers = tf.data.Dataset.range(7)

    def elements(dataset: Any) -> list[int]:
        return [int(element) for element in dataset]

    ways = "keep", "drop", "repeat"
    keep, drop, repeat = (elements(mt.shard_dataset(numbers, comm, remainder=how)) for how in ways)
    assert keep == list(range(7))[rank::size]
    assert drop == list(range(7 - 7 % size))[rank::size]
    assert repeat == [*range(7), *range(size - 7 % size if 7 % size else 0)][rank::size]
    assert elements(mt.shard_dataset(tf.data.Dataset.range(1), comm, remainder="repeat")) == [0]
    unknown = numbers.filter(lambda number: number > 0)
    if size > 1:
        refused(UsageError, {"assert_cardinality": lambda: mt.shard_dataset(unknown, comm)})
    known = mt.shard_dataset(unknown.apply(tf.data.experimental.assert_cardinality(6)), comm)
    assert elements(known) == list(range(1, 7))[rank::size]
    with pytest.raises(UsageError, match="remainder is 'pad'"):
        mt.shard_dataset(numbers, comm, remainder="pad")  # type: ignore[arg-type]
