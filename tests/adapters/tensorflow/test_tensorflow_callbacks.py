"""The Keras callbacks and the sharding of datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import multiring.tensorflow as mt
from multiring import Communicator
from multiring.errors import UsageError
from multiring.tensorflow import callbacks
from tests.on_ranks import on_ranks, same_everywhere


def make_model(comm: Communicator, units: int = 3) -> Any:
    keras.utils.set_random_seed(comm.rank)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(units)])
    model.compile(mt.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), comm), "mse")
    return model


def fit(comm: Communicator, model: Any, *added: Any, epochs: int = 2, **options: Any) -> Any:
    draw = np.random.default_rng(comm.rank)
    x, y = draw.standard_normal((8, 4)), draw.standard_normal((8, 3))
    return model.fit(x, y, 2, epochs=epochs, verbose=0, shuffle=False, callbacks=list(added), **options)


def state(model: Any) -> list[bytes]:
    variables = [*model.weights, *model.optimizer.variables]
    return [np.asarray(variable.numpy()).tobytes() for variable in variables]


def test_state_is_broadcast_and_metrics_are_averaged(comm: Communicator) -> None:
    model = make_model(comm)
    assert len({tuple(found) for found in comm.allgather_object(state(model)[:2])}) == comm.size
    first = callbacks.BroadcastInitialState(root=1, comm=comm)
    plain = fit(comm, model, first).history["loss"]
    assert same_everywhere(comm, state(model))
    everyone = comm.allgather_object(plain)
    assert everyone[0] != everyone[1]
    averaged = fit(comm, model, callbacks.MetricAverage(weight=lambda: 1.0 + comm.rank, comm=comm)).history
    assert same_everywhere(comm, averaged)


class Rates(keras.callbacks.Callback):  # type: ignore[misc]
    """Records the learning rate of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.found.append(round(float(self.model.optimizer.learning_rate), 6))


def test_learning_rates(comm: Communicator) -> None:
    rates = Rates()
    warmup = callbacks.LearningRateWarmup(0.8, 6, comm=comm)
    decay = callbacks.LearningRateSchedule(0.8, lambda epoch: 0.5 ** (epoch - 1), start_epoch=2)
    start_alike = callbacks.BroadcastInitialState(comm=comm)
    fit(comm, make_model(comm), start_alike, warmup, decay, rates, epochs=4)
    start = 0.8 / comm.size
    rising = [round(start + (0.8 - start) * (k + 1) / 6, 6) for k in range(6)]
    assert rates.found == [*rising, 0.8, 0.8, *[0.4] * 4, *[0.2] * 4]
    fine = Rates()
    every = callbacks.LearningRateSchedule(1.0, lambda epoch: epoch, end_epoch=1, steps_per_epoch=4)
    fit(comm, make_model(comm), callbacks.BroadcastInitialState(comm=comm), every, fine, epochs=2)
    assert fine.found == [0.0, 0.25, 0.5, 0.75, *[0.75] * 4]
    with pytest.raises(UsageError, match="warm-up of 0 steps"):
        callbacks.LearningRateWarmup(0.1, 0)


def test_training_goes_on_from_a_checkpoint_of_rank_0(comm: Communicator, tmp_path: Path) -> None:
    path = tmp_path / "sub" / "training.npz"
    through = make_model(comm)
    assert callbacks.resume(through, path, comm) == 0
    start = callbacks.BroadcastInitialState(comm=comm)
    fit(comm, through, start, callbacks.RankZeroCheckpoint(path, comm), epochs=2)
    comm.barrier()
    fit(comm, through, epochs=4, initial_epoch=2)
    later = make_model(comm)
    if comm.rank == 1:
        path = Path("/nowhere")  # only rank 0 reads
    done = callbacks.resume(later, path, comm)
    assert done == 2
    fit(comm, later, epochs=4, initial_epoch=done)
    assert state(later) == state(through)
    with pytest.raises(UsageError, match="checkpoint of another model"):
        callbacks.resume(make_model(comm, units=2), path, comm)


@on_ranks(1, 3)
def test_shards_of_a_dataset(comm: Communicator) -> None:
    size, rank = comm.size, comm.rank
    numbers = tf.data.Dataset.range(7)

    def elements(dataset: Any) -> list[int]:
        return [int(element) for element in dataset]

    keep, drop, repeat = (
        elements(mt.shard_dataset(numbers, comm, remainder=how)) for how in ("keep", "drop", "repeat")
    )
    assert keep == list(range(7))[rank::size]
    assert drop == list(range(7 - 7 % size))[rank::size]
    assert repeat == [*range(7), *range(size - 7 % size if 7 % size else 0)][rank::size]
    tiny = elements(mt.shard_dataset(tf.data.Dataset.range(1), comm, remainder="repeat"))
    assert tiny == [0]
    unknown = numbers.filter(lambda number: number > 0)
    if size > 1:
        with pytest.raises(UsageError, match="assert_cardinality"):
            mt.shard_dataset(unknown, comm)
    known = mt.shard_dataset(unknown.apply(tf.data.experimental.assert_cardinality(6)), comm)
    assert elements(known) == list(range(1, 7))[rank::size]
    with pytest.raises(UsageError, match="remainder is 'pad'"):
        mt.shard_dataset(numbers, comm, remainder="pad")  # type: ignore[arg-type]
