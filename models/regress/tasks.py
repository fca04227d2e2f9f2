"""What a rank does for the checks: short trainings, probes, a real training, timed steps.

Every task returns values for JSON and arrays, of rank 0, and hashes, of every rank.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from multiring import Communicator
from multiring.commands.frameworks import Framework
from multiring.errors import UsageError
from multiring.models.data import open_dataset
from multiring.models.data.loader import Batch
from multiring.models.data.sharding import epoch_order, local_slice
from multiring.models.frameworks import load_trainer
from multiring.models.nets.resnet_spec import ResNetSpec, resnet
from multiring.models.regress.checks import SPEED_BATCH, Setup
from multiring.models.trainers.recipe import Recipe
from multiring.models.trainers.trainer import Trainer, hash_arrays

__all__ = ["Bench", "Found", "UnavailableError", "run_task"]

Array = npt.NDArray[Any]
DIGITS_BATCH = 64
WEIGHTS = "model/"


class UnavailableError(Exception):
    """The framework does not have what the task needs; says what."""


@dataclass(frozen=True)
class Bench:
    """Where a task runs.

    Attributes:
        framework: Trains; with its own way, if speed is to be compared with it.
        comm: All ranks.
        setup: The setting.
        cores: Processors that the ranks have together.
    """

    framework: Framework
    comm: Communicator
    setup: Setup
    cores: int


@dataclass(frozen=True)
class Found:
    """What came out of a task on this rank.

    Attributes:
        values: For JSON.
        arrays: By name.
        hashes: Of what has to be equal on all ranks, by name.
    """

    values: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)


def run_task(name: str, bench: Bench) -> Found:
    """Run a task: "probe-float32", "train-uneven", "accuracy", "speed". Called by all ranks.

    Raises:
        UnavailableError: The framework lacks what is needed, on every rank alike.
    """
    kind, _, variant = name.partition("-")
    return TASKS[kind](bench, variant)


def _probe(bench: Bench, dtype: str) -> Found:
    setup = bench.setup
    with closing(_trainer(bench, dtype, setup.batch)) as trainer:
        probe = trainer.probe(_batch(setup, 0, setup.batch, slice(None)))
    gradients = {f"gradient/{name}": value for name, value in probe.gradients.items()}
    return Found(arrays={"scores": probe.scores, **gradients})


def _train(bench: Bench, variant: str) -> Found:
    setup, comm = bench.setup, bench.comm
    dtype = "float32" if variant == "float32" else "float64"
    losses, first = [], 0
    with closing(_trainer(bench, dtype, setup.batch)) as trainer:
        for count in setup.global_batches(variant):
            batch = _batch(setup, first, count, local_slice(count, comm.rank, comm.size))
            sums = trainer.step(batch, setup.lr)
            losses.append(float(comm.allreduce(np.array([sums.loss]))[0]) / count)
            first += count
        weights = _weights(trainer)
        hashes = {"state": trainer.fingerprint(), "weights": hash_arrays(weights)}
    return Found({"losses": losses}, {"losses": np.array(losses), **weights}, hashes)


def _trainer(bench: Bench, dtype: str, global_batch: int) -> Trainer:
    setup = bench.setup
    recipe = Recipe(
        base_lr=setup.lr,
        global_batch=global_batch,
        reference_batch=global_batch,
        total_steps=setup.steps,
        decay="constant",
        weight_decay=5e-4,
    )
    spec = resnet(setup.depth, classes=10, in_channels=1, stem="cifar")
    refused: str | None = None
    try:
        trainer = load_trainer(bench.framework)(spec, recipe, bench.comm, seed=setup.seed, dtype=dtype)
    except (UsageError, NotImplementedError) as error:
        if dtype == "float32":
            raise
        refused = str(error)
    refusals: list[str | None] = bench.comm.allgather_object(refused)
    if None not in refusals:
        raise UnavailableError(f"{dtype} is not there: {refused}")
    if any(refusals):
        raise UsageError(f"{dtype} is refused on some ranks only: {refusals}")
    return trainer


def _batch(setup: Setup, first: int, count: int, part: slice) -> Batch:
    """The part of the global batch of `count` images that begins at `first` in the order of the epoch."""
    dataset = open_dataset("digits", image_size=setup.image_size)
    order = epoch_order(dataset.count("train"), setup.seed, 0)
    indices = np.take(order, np.arange(first, first + count), mode="wrap")[part]
    images, labels = dataset.load("train", indices, seed=setup.seed, epoch=0)
    return Batch(images, labels, count)


def _weights(trainer: Trainer) -> dict[str, Array]:
    return {name: value for name, value in trainer.state().items() if name.startswith(WEIGHTS)}


def _accuracy(bench: Bench, _: str) -> Found:
    from multiring.models.train import train
    from multiring.models.training.options import TrainOptions
    from multiring.models.training.report import read_metrics

    comm, epochs = bench.comm, bench.setup.epochs
    with tempfile.TemporaryDirectory() as directory:
        options = TrainOptions(
            framework=bench.framework.name,
            depth=bench.setup.depth,
            epochs=epochs,
            batch_size=max(1, DIGITS_BATCH // comm.size),
            eval_every=epochs,
            checkpoint_every=0,
            log_every=2,
            output_dir=directory,
            report=False,
        )
        result = train(options, comm)
        comm.barrier()
        records = read_metrics(Path(directory) / "metrics.jsonl") if comm.rank == 0 else []
    curve = [[r["position"], r["loss"]] for r in records if r["kind"] == "step"]
    values = {"accuracy": result.test.accuracy, "images": result.test.count, "curve": curve}
    return Found(values, hashes={"state": result.fingerprint})


def _speed(bench: Bench, _: str) -> Found:
    from multiring.benchmarks.gradients.training_speed import measure_training

    spec: ResNetSpec = resnet(bench.setup.speed_depth, classes=10, in_channels=3, stem="cifar")
    speed, fingerprint = measure_training(
        bench.framework,
        bench.comm,
        spec,
        batch=SPEED_BATCH,
        cores=bench.cores,
        seconds=bench.setup.speed_seconds,
    )
    return Found(asdict(speed), hashes={"state": fingerprint})


TASKS: Mapping[str, Callable[[Bench, str], Found]] = {
    "probe": _probe,
    "train": _train,
    "accuracy": _accuracy,
    "speed": _speed,
}
