"""`multiring train` over several ranks: learning, agreement, resuming elsewhere, and errors on every rank."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from multiring import Communicator
from multiring.models.errors import CheckpointError, DivergenceError
from multiring.models.nets.resnet_spec import resnet
from multiring.models.train import train
from multiring.models.trainers.recipe import Recipe
from multiring.models.trainers.train_torch import TorchTrainer
from multiring.models.trainers.trainer import hash_arrays
from multiring.models.training.options import TrainOptions, add_arguments
from tests.rank_pool import RankPool
from tests.support import parsed, run_multiring

Ranks = Callable[[int], RankPool]

SMALL = ["--image-size=8", "--threads=1", "--no-report", "--batch-size=16"]


def train_here(comm: Communicator, directory: str, *arguments: str) -> tuple[int, str, float]:
    options = parsed(add_arguments, *SMALL, f"--output-dir={directory}", *arguments)
    result = train(TrainOptions.from_namespace(options), comm)
    comm.barrier()
    return result.steps, result.fingerprint, result.test.accuracy


def train_with_a_rank_gone_astray(comm: Communicator, directory: str) -> None:
    honest = TorchTrainer.fingerprint
    if comm.rank == 1:
        TorchTrainer.fingerprint = lambda self: "other bits"  # type: ignore[method-assign]
    try:
        train_here(comm, directory, "--limit-steps=2", "--verify-every=1")
    finally:
        TorchTrainer.fingerprint = honest  # type: ignore[method-assign]


def running_statistics(comm: Communicator, sync_bn: bool) -> list[str]:
    """Hashes of the whole state before and after `synchronise`, each rank having seen other images."""
    import multiring.models.data.loader as loader

    spec = resnet(8, classes=10, in_channels=1)
    recipe = Recipe(0.1, global_batch=8, total_steps=10)
    trainer = TorchTrainer(spec, recipe, comm, seed=0, sync_bn=sync_bn)
    generator = np.random.default_rng(comm.rank)
    images = generator.standard_normal((4, 1, 8, 8), dtype=np.float32)
    trainer.step(loader.Batch(images, generator.integers(0, 10, size=4), 4 * comm.size), lr=0.1)
    before = hash_arrays(trainer.state())
    trainer.synchronise()
    after = hash_arrays(trainer.state())
    trainer.close()
    return [before, after]


def test_two_ranks_learn_to_read_digits(tmp_path: Path) -> None:
    done = run_multiring("train", "-np", "2", "--epochs=3", f"--output-dir={tmp_path}", code=0)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["ranks"] == 2
    assert summary["global_batch"] == 64
    assert summary["test_accuracy"] > 0.9  # `multiring regress` asks for more, of more epochs
    for name in ("curve.png", "metrics.jsonl", "checkpoints", "tensorboard"):
        assert (tmp_path / name).exists()
        assert str(tmp_path / name) in done.stdout


@pytest.mark.parametrize("sync_bn", [True, False])
def test_running_statistics_are_equal_where_they_are_used(ranks: Ranks, sync_bn: bool) -> None:
    before, after = zip(*ranks(2).run(running_statistics, sync_bn), strict=True)
    assert len(set(after)) == 1
    assert len(set(before)) == (1 if sync_bn else 2)


def test_ranks_that_hold_other_bits_are_found_out(ranks: Ranks, tmp_path: Path) -> None:
    for error in ranks(2).run_expecting_errors(train_with_a_rank_gone_astray, str(tmp_path)):
        assert isinstance(error, DivergenceError)
        assert "after step 1 other bits than on rank 0 are on rank 1" in str(error)


def test_every_rank_learns_that_the_checkpoint_is_damaged(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "step-000000001.npz").write_bytes(b"rubbish")
    arguments = (f"--resume={tmp_path}", "--limit-steps=2")
    with tempfile.TemporaryDirectory() as directory:
        errors = ranks(2).run_expecting_errors(train_here, directory, *arguments)
    for error in errors:
        assert isinstance(error, CheckpointError)
        assert "step-000000001.npz is damaged" in str(error)


def test_a_damaged_image_that_one_rank_meets_ends_the_job_and_is_named(tmp_path: Path) -> None:
    generator: Any = np.random.default_rng(0)
    for split in ("train", "val"):
        folder = tmp_path / "images" / split / "only"
        folder.mkdir(parents=True)
        for number in range(8):
            pixels = generator.integers(0, 255, size=(20, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    bad = tmp_path / "images" / "train" / "only" / "3.png"
    bad.write_bytes(bad.read_bytes()[:100])
    done = run_multiring(
        *("train", "-np", "2", f"--data={tmp_path / 'images'}", "--depth=8", "--epochs=2", "--batch-size=2"),
        *("--image-size=16", f"--output-dir={tmp_path / 'out'}", "--no-report"),
        code=1,
    )
    assert f"cannot read image {bad}" in done.stderr


def test_a_number_of_ranks_that_is_not_the_jobs_is_refused(tmp_path: Path) -> None:
    done = run_multiring("run", "-np", "2", "-m", "multiring.models.train", "-np", "3", code=2)
    assert done.stderr.count("-np 3 was given inside a job of 2 ranks; leave it out") == 1
    assert "failed with" not in done.stderr
