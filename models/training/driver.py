"""The training loop that every framework shares: order, evaluation, checkpoints, records."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from multiring import Communicator
from multiring.models.data import Dataset
from multiring.models.data.loader import Batch, evaluation_batches, training_batches
from multiring.models.data.sharding import steps_per_epoch
from multiring.models.errors import CheckpointError, DivergenceError
from multiring.models.nets.resnet_spec import ResNetSpec
from multiring.models.trainers.recipe import Recipe
from multiring.models.trainers.trainer import Sums, Trainer
from multiring.models.training import checkpoint
from multiring.models.training.checkpoint import Checkpoint
from multiring.models.training.options import WARM_UP_STEPS, ResolvedOptions, TrainOptions
from multiring.models.training.outputs import Outputs

__all__ = ["Driver", "Job", "Result"]

# Fewest and most samples of a batch in an evaluation.
EVALUATION_BATCH = (64, 256)


@dataclass(frozen=True)
class Job:
    """Everything about a training that stays the same while it runs, equal on all ranks but for `comm`."""

    options: TrainOptions
    resolved: ResolvedOptions
    dataset: Dataset
    spec: ResNetSpec
    recipe: Recipe
    comm: Communicator
    output_dir: Path

    @property
    def global_batch(self) -> int:
        """Samples per step over all ranks."""
        return self.recipe.global_batch

    @property
    def rank_batch(self) -> int:
        """Most samples per step of one rank."""
        return -(-self.global_batch // self.comm.size)

    @property
    def per_epoch(self) -> int:
        """Steps per epoch."""
        return steps_per_epoch(self.dataset.count("train"), self.global_batch)

    @property
    def last_step(self) -> int:
        """Steps after which the training ends."""
        return min(self.recipe.total_steps, self.options.limit_steps or self.recipe.total_steps)

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.output_dir / "checkpoints"

    def identity(self) -> dict[str, Any]:
        """What has to be equal for a checkpoint to be continued; JSON values.

        The number of ranks is not among it: with the same global batch the training is the same but for
        rounding.
        """
        options = {
            name: getattr(self.options, name) for name in ("framework", "data", "seed", "sync_bn", "dtype")
        }
        resolved = {
            name: getattr(self.resolved, name) for name in ("depth", "stem", "image_size", "zero_residual")
        }
        return options | resolved | {"classes": self.spec.classes, "recipe": asdict(self.recipe)}


@dataclass(frozen=True)
class Result:
    """What came out of a training, equal on all ranks but for `checkpoint`, which only rank 0 has.

    Attributes:
        steps: Steps done in all, before a resumption included.
        trained_images: Samples of this process's steps over all ranks.
        seconds: Time of these steps on this rank, without evaluation and checkpoints.
        test: Sums over all test images after the last step; empty if `--eval-every` is 0.
        fingerprint: Hash of the final state of this rank.
        checkpoint: The last checkpoint.
        steady_speed: Images per second over all ranks after the first steps of this process.
    """

    steps: int
    trained_images: int
    seconds: float
    test: Sums
    fingerprint: str
    checkpoint: Path | None
    steady_speed: float = 0.0


class Driver:
    """Runs a job to its end; made and run by all ranks together.

    Args:
        job: The job.
        trainer: This rank's network and optimizer.
        outputs: Where records go; one that does nothing on ranks other than 0.
    """

    def __init__(self, job: Job, trainer: Trainer, outputs: Outputs) -> None:
        self._job = job
        self._trainer = trainer
        self._outputs = outputs
        self._step = 0
        self._epoch_sums = Sums()
        self._interval_sums = Sums()
        self._images = 0
        self._seconds = 0.0
        self._steps_here = 0
        self._steady = [0, 0.0]  # images and seconds after the first steps
        self._before = (0, 0.0)
        self._saved: Path | None = None

    def resume(self, state: Checkpoint) -> None:
        """Continue from a checkpoint, which has to be the same on all ranks.

        Raises:
            CheckpointError: It belongs to another training; names what differs.
        """
        check_identity(self._job.identity(), state, extend=self._job.options.extend)
        self._trainer.load_state(state.arrays)
        self._step = state.step
        if self._job.comm.rank == 0:
            self._epoch_sums = Sums(**state.progress["epoch_sums"])
            self._interval_sums = Sums(**state.progress["interval_sums"])

    def run(self) -> Result:
        """Train to the end and evaluate.

        Raises:
            DivergenceError: The loss is not finite, or ranks hold different bits.
            DataError: An image cannot be read.
            CheckpointError: A checkpoint cannot be written.
        """
        job, options = self._job, self._job.options
        test: Sums | None = None
        while self._step < job.last_step:
            epoch = self._step // job.per_epoch
            self._train_epoch(epoch)
            done = self._step >= job.last_step
            test = self._evaluate() if _due(options.eval_every, epoch, done) else None
            self._record_epoch(epoch, test)
            if self._step % job.per_epoch == 0:
                self._epoch_sums = Sums()
            if _due(options.checkpoint_every, epoch, done):
                self._save()
        if test is None:
            test = self._evaluate() if options.eval_every else Sums()
        images, seconds = self._steady
        return Result(
            *(self._step, self._images, self._seconds, test, self._trainer.fingerprint(), self._saved),
            steady_speed=images / seconds if seconds else 0.0,
        )

    def _train_epoch(self, epoch: int) -> None:
        job, comm = self._job, self._job.comm
        self._before = (self._images, self._seconds)
        batches = training_batches(
            job.dataset,
            seed=job.options.seed,
            epoch=epoch,
            global_batch=job.global_batch,
            rank=comm.rank,
            size=comm.size,
            first_step=self._step - epoch * job.per_epoch,
        )
        start = last = time.perf_counter()
        with closing(batches):
            for batch in batches:
                self._train_step(batch)
                before, last = last, time.perf_counter()
                self._steps_here += 1
                if self._steps_here > WARM_UP_STEPS:
                    self._steady[0] += batch.global_count
                    self._steady[1] += last - before
                if self._step >= job.last_step:
                    break
        self._seconds += time.perf_counter() - start

    def _train_step(self, batch: Batch) -> None:
        options = self._job.options
        lr = self._job.recipe.lr(self._step)
        sums = self._trainer.step(batch, lr)
        self._step += 1
        self._images += batch.global_count
        self._epoch_sums += sums
        self._interval_sums += sums
        verify = options.verify_every and self._step % options.verify_every == 0
        fingerprint = self._verify() if verify else None
        if self._step % options.log_every == 0:
            self._record_interval(lr, fingerprint)

    def _record_interval(self, lr: float, fingerprint: str | None) -> None:
        total = self._reduce(self._interval_sums)
        self._interval_sums = Sums()
        if not math.isfinite(total.mean_loss):
            raise DivergenceError(
                f"the training loss is {total.mean_loss} at step {self._step} with learning rate {lr:.4g}; "
                "lower --lr "
                "or lengthen --warmup-epochs"
            )
        record = {"kind": "step", "loss": total.mean_loss, "accuracy": total.accuracy, "lr": lr}
        if fingerprint is not None:
            record["fingerprint"] = fingerprint
        self._outputs.record(self._step, self._step / self._job.per_epoch, record)

    def _record_epoch(self, epoch: int, test: Sums | None) -> None:
        total = self._reduce(self._epoch_sums)
        images, seconds = self._images - self._before[0], self._seconds - self._before[1]
        record: dict[str, Any] = {
            "kind": "epoch",
            "epoch": epoch,
            "train_loss": total.mean_loss,
            "train_accuracy": total.accuracy,
            "images_per_second": images / max(seconds, 1e-9),
        }
        if test is not None:
            record |= {"test_loss": test.mean_loss, "test_accuracy": test.accuracy}
        self._outputs.record(self._step, self._step / self._job.per_epoch, record)

    def _evaluate(self) -> Sums:
        comm = self._job.comm
        self._trainer.synchronise()
        sums = Sums()
        batch = min(max(self._job.rank_batch, EVALUATION_BATCH[0]), EVALUATION_BATCH[1])
        for part in evaluation_batches(self._job.dataset, batch=batch, rank=comm.rank, size=comm.size):
            sums += self._trainer.evaluate(part)
        return self._reduce(sums)

    def _save(self) -> None:
        self._trainer.synchronise()
        # Rank 0 takes over the sums, so that its checkpoint holds all of them and a continuation adds alike.
        epoch_sums, interval_sums = self._reduce(self._epoch_sums), self._reduce(self._interval_sums)
        self._epoch_sums = self._interval_sums = Sums()
        if self._job.comm.rank == 0:
            self._epoch_sums, self._interval_sums = epoch_sums, interval_sums
            state = Checkpoint(
                self._step,
                self._step // self._job.per_epoch,
                self._job.identity(),
                self._trainer.state(),
                progress={"epoch_sums": asdict(epoch_sums), "interval_sums": asdict(interval_sums)},
            )
            self._saved = checkpoint.save(self._job.checkpoints, state, keep=self._job.options.keep)

    def _reduce(self, sums: Sums) -> Sums:
        # Counts stay exact in float64 up to 2**53.
        values = np.array([sums.loss, sums.correct, sums.count], dtype=np.float64)
        total = self._job.comm.allreduce(values, op="sum", name="metrics")
        return Sums(float(total[0]), int(total[1]), int(total[2]))

    def _verify(self) -> str:
        own = self._trainer.fingerprint()
        prints = self._job.comm.allgather_object(own)
        others = [rank for rank, value in enumerate(prints) if value != prints[0]]
        if others:
            raise DivergenceError(
                f"after step {self._step} other bits than on rank 0 are on rank "
                f"{', '.join(map(str, others))}; "
                "training on would give a different network on each"
            )
        return own


def _due(every: int, epoch: int, done: bool) -> bool:
    return every > 0 and (done or (epoch + 1) % every == 0)


def _differs_in_length_alone(expected: dict[str, Any], found: Mapping[str, Any]) -> bool:
    def but_length(config: Mapping[str, Any]) -> dict[str, Any]:
        return {**config, "recipe": {**config.get("recipe", {}), "total_steps": 0}}

    return expected != found and but_length(expected) == but_length(found)


def check_identity(expected: dict[str, Any], state: Checkpoint, *, extend: bool = False) -> None:
    """Compare a checkpoint's configuration with the job's.

    Args:
        expected: The job's.
        state: The checkpoint.
        extend: Whether the number of epochs may be larger.

    Raises:
        CheckpointError: Something differs; names it with both values. Or the checkpoint is beyond the end.
    """
    if _differs_in_length_alone(expected, state.config):
        recipe, before = expected["recipe"], state.config["recipe"]
        if recipe["total_steps"] < state.step:
            raise CheckpointError(
                f"--epochs makes the training one of {recipe['total_steps']} steps, and the checkpoint is of "
                f"step {state.step}: give more epochs to go on, or another --output-dir to start afresh"
            )
        if extend and recipe["total_steps"] <= before["total_steps"]:
            raise CheckpointError(
                f"--extend asks for a longer training, and --epochs makes it {recipe['total_steps']} steps; "
                f"it had {before['total_steps']} before. Give more --epochs"
            )
        if extend or recipe["decay"] == "constant":  # no rate depends on the length
            return
        raise CheckpointError(
            f"only the number of epochs differs: the checkpoint is of a training of {before['total_steps']} "
            f"steps, and --epochs makes it {recipe['total_steps']}. The learning rate ({recipe['decay']}) "
            "depends on it from the start. Give --extend to go on with the learning rates of the new number, "
            "or the same --epochs as before; a training with --decay constant goes on with any number"
        )
    differences = [
        f"{key} is {expected.get(key)!r}, the checkpoint has {state.config.get(key)!r}"
        for key in sorted(expected.keys() | state.config.keys())
        if expected.get(key) != state.config.get(key)
    ]
    if differences:
        raise CheckpointError(
            "the checkpoint belongs to another training: "
            + "; ".join(differences)
            + "; give the same options (the "
            "global batch is --batch-size times the ranks) or start afresh in another --output-dir"
        )
