"""`multiring train` over several ranks: learning, agreement, resuming elsewhere, and errors on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from multiring import Communicator
from multiring.models.errors import CheckpointError, DivergenceError
from multiring.models.train import train
from multiring.models.trainers.train_torch import TorchTrainer
from multiring.models.trainers.trainer import hash_arrays
from multiring.models.training.options import TrainOptions, add_arguments
from tests.python.models.images import write_images
from tests.python.models.trainer_contract import make, part_of, whole_batch
from tests.rank_pool import RankPool
from tests.support import parsed, run_multiring

Ranks = Callable[[int], RankPool]

SMALL = ["--image-size=8", "--threads=1", "--no-report", "--batch-size=16"]


def train_here(comm: Communicator, directory: str, *arguments: str) -> None:
    options = parsed(add_arguments, *SMALL, f"--output-dir={directory}", *arguments)
    train(TrainOptions.from_namespace(options), comm)


def train_with_a_rank_gone_astray(comm: Communicator, directory: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(TorchTrainer, "fingerprint", lambda self: "other bits")
        train_here(comm, directory, "--limit-steps=2", "--verify-every=1")


def running_statistics(comm: Communicator, sync_bn: bool) -> list[str]:
    """Hashes of the whole state before and after `synchronise`, each rank having seen other images."""
    trainer = make("torch", comm, seed=0, sync_bn=sync_bn)
    trainer.step(part_of(whole_batch(0), (6, 6), comm.rank), lr=0.1)
    before = hash_arrays(trainer.state())
    trainer.synchronise()
    after = hash_arrays(trainer.state())
    trainer.close()
    return [before, after]


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
    arguments = (str(tmp_path / "out"), f"--resume={tmp_path}", "--limit-steps=2")
    for error in ranks(2).run_expecting_errors(train_here, *arguments):
        assert isinstance(error, CheckpointError)
        assert "step-000000001.npz is damaged" in str(error)


def test_a_damaged_image_that_one_rank_meets_ends_the_job_and_is_named(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", "only", 8, 8)
    bad = images / "train" / "only" / "3.png"
    bad.write_bytes(bad.read_bytes()[:100])
    words = [f"--data={images}", "--depth=8", "--epochs=2", "--batch-size=2", "--image-size=16"]
    words += [f"--output-dir={tmp_path / 'out'}", "--no-report"]
    assert f"cannot read image {bad}" in run_multiring("train", "-np", "2", *words, code=1).stderr


def test_a_number_of_ranks_that_is_not_the_jobs_is_refused() -> None:
    done = run_multiring("run", "-np", "2", "-m", "multiring.models.train", "-np", "3", code=2)
    assert done.stderr.count("-np 3 was given inside a job of 2 ranks; leave it out") == 1
    assert "failed with" not in done.stderr


@pytest.mark.full
def test_a_job_is_compared_with_one_rank(tmp_path: Path) -> None:
    words = ("--image-size=8", "--limit-steps=8", "--no-report", f"--output-dir={tmp_path / 'out'}")
    told = run_multiring("train", "-np", "2", "--compare", *words, code=0).stdout
    first = "comparing: short trainings on one rank and on 2 that do not wait for one another, then the job"
    assert told.splitlines()[0] == first
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    speed_up = summary["steady_images_per_second"] / summary["one_rank_images_per_second"]
    assert summary["speed_up"] == pytest.approx(speed_up)
    assert summary["efficiency"] == pytest.approx(speed_up / 2)
    in_step = summary["steady_images_per_second"] / summary["unsynchronised_images_per_second"]
    assert summary["efficiency_beside_unsynchronised"] == pytest.approx(in_step)
    assert f"in step    {100 * in_step:.0f} % of the speed of 2 ranks that do not wait" in told
    assert f"speed-up   {speed_up:.2f} times one rank with the same share of this host" in told
    again = run_multiring("train", "-np", "2", "--compare", *words, code=2)
    assert again.stdout == ""  # before anything is measured
    assert "holds the results of an earlier training" in again.stderr
    wrong = run_multiring("train", "-np", "2", "--compare", "--data=/nowhere", code=2).stderr
    assert "--compare: the short training on one rank failed (see above)" in wrong
    assert "--compare starts its ranks itself: give -np" in run_multiring("train", "--compare", code=2).stderr
