"""The ResNet in JAX: the same numbers as in Torch, and N ranks like one."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multiring
from multiring import Communicator
from multiring.errors import UsageError
from multiring.models.errors import CheckpointError
from multiring.models.loader import Batch
from multiring.models.recipe import Recipe
from multiring.models.resnet_jax import load_weights, read_weights
from multiring.models.resnet_spec import resnet
from multiring.models.sharding import local_slice
from multiring.models.train_jax import JaxTrainer
from multiring.models.train_torch import TorchTrainer
from multiring.models.weights import initial_weights
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]

SPEC = resnet(8, classes=5, in_channels=2)
RECIPE = Recipe(0.1, global_batch=7, total_steps=10, weight_decay=1e-3)


def batch(step: int, samples: int = 7) -> Batch:
    draw = np.random.default_rng(step)
    images = draw.standard_normal((samples, 2, 8, 8), dtype=np.float32)
    return Batch(images, draw.integers(0, 5, size=samples), samples)


def part(whole: Batch, rows: slice) -> Batch:
    return Batch(whole.images[rows], whole.labels[rows], whole.global_count)


def furthest(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Largest difference of two sets of arrays, relative to the largest value of each array."""
    assert found.keys() == wanted.keys()
    return max(float(np.abs(found[n] - wanted[n]).max() / (np.abs(wanted[n]).max() + 1e-12)) for n in wanted)


@pytest.fixture
def comm() -> Iterator[Communicator]:
    yield multiring.init()
    multiring.shutdown()


# Programs take seconds to compile, so each test runs as few as it can.


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float64", 1e-9)])
def test_scores_and_gradients_are_those_of_torch(comm: Communicator, dtype: str, tolerance: float) -> None:
    ours, theirs = (make(SPEC, RECIPE, comm, seed=3, dtype=dtype) for make in (JaxTrainer, TorchTrainer))
    before = ours.fingerprint()
    found, wanted = ours.probe(batch(0)), theirs.probe(batch(0))
    assert found.scores.dtype == dtype
    assert furthest({"scores": found.scores}, {"scores": wanted.scores}) < tolerance
    assert furthest(found.gradients, wanted.gradients) < tolerance
    assert ours.fingerprint() == before


def test_steps_and_evaluation_are_those_of_torch(comm: Communicator) -> None:
    """With batches of different sizes, and running statistics in the evaluation."""
    ours, theirs = (make(SPEC, RECIPE, comm, seed=3, dtype="float64") for make in (JaxTrainer, TorchTrainer))
    for step, samples in enumerate((7, 7, 2)):
        mine, other = ours.step(batch(step, samples), 0.05), theirs.step(batch(step, samples), 0.05)
        assert mine.loss == pytest.approx(other.loss, rel=1e-9)
        assert (mine.correct, mine.count) == (other.correct, other.count)
    wanted = {name: value for name, value in theirs.state().items() if not name.startswith("rng/")}
    assert furthest(ours.state(), wanted) < 1e-9
    for samples in (7, 3):
        mine, other = ours.evaluate(batch(9, samples)), theirs.evaluate(batch(9, samples))
        assert mine.loss == pytest.approx(other.loss, rel=1e-9)
        assert (mine.correct, mine.count) == (other.correct, other.count)


def follow(comm: Communicator, sizes: list[int]) -> None:
    """Ranks with parts of a batch, one of them maybe without any, follow one rank with all of it."""
    trainer = JaxTrainer(SPEC, RECIPE, comm, seed=3, dtype="float64")
    alone = TorchTrainer(SPEC, RECIPE, comm.split(comm.rank) or comm, seed=3, dtype="float64")
    for step, samples in enumerate(sizes):
        whole = batch(step, samples)
        mine = part(whole, local_slice(samples, comm.rank, comm.size))
        sums = trainer.step(mine, 0.05)
        wanted = alone.step(whole, 0.05)
        assert sums.count == len(mine.labels)
        total = comm.allreduce(np.array([sums.loss, sums.correct]))
        assert total[0] == pytest.approx(wanted.loss, rel=1e-9)
        assert int(total[1]) == wanted.correct
        state = {name: value for name, value in alone.state().items() if not name.startswith("rng/")}
        assert furthest(trainer.state(), state) < 1e-9
    assert len(set(comm.allgather_object(trainer.fingerprint()))) == 1


def test_ranks_train_like_one(ranks: Ranks) -> None:
    ranks(2).run(follow, [6, 6, 5, 1], timeout=120.0)


def separate_statistics(comm: Communicator) -> tuple[str, str]:
    """Without synchronised normalisation ranks differ in running statistics until `synchronise`; one has no
    samples in the second step."""
    trainer = JaxTrainer(SPEC, RECIPE, comm, seed=comm.rank, sync_bn=False)
    for step, samples in enumerate((6, 1)):
        whole = batch(step, samples)
        trainer.step(part(whole, local_slice(samples, comm.rank, comm.size)), 0.05)
    assert all(np.isfinite(value).all() for value in trainer.state().values())
    assert len(set(comm.allgather_object(trainer.fingerprint()))) == 1
    name = "model/stem.bn.running_mean"
    before = trainer.state()[name].tobytes().hex()
    trainer.synchronise()
    return before, trainer.state()[name].tobytes().hex()


def test_separate_running_statistics(ranks: Ranks) -> None:
    before, after = zip(*ranks(2).run(separate_statistics, timeout=120.0), strict=True)
    assert len(set(before)) == 2
    assert len(set(after)) == 1


def test_a_state_goes_round(comm: Communicator) -> None:
    make = functools.partial(JaxTrainer, SPEC, RECIPE, comm)
    trainer, other = make(seed=0), make(seed=1)
    trainer.step(batch(0), 0.05)
    state = trainer.state()
    trainer.step(batch(1), 0.05)
    after = trainer.fingerprint()
    assert other.fingerprint() != after
    other.load_state(trainer.state())
    assert other.fingerprint() == after
    trainer.load_state(state)
    assert trainer.fingerprint() != after
    trainer.step(batch(1), 0.05)
    assert trainer.fingerprint() == after
    state["model/head.dense.bias"] = np.zeros(4, np.float32)
    with pytest.raises(CheckpointError, match="of another network: head.dense.bias"):
        other.load_state(state)


def test_weights_come_back_as_they_were_loaded() -> None:
    weights = initial_weights(SPEC, 0)
    parameters, running = load_weights(SPEC, weights, np.dtype(np.float32))
    assert parameters["stem.conv.weight"].shape == (3, 3, 2, 16)
    found = read_weights({**parameters, **running})
    for name, value in weights.items():
        np.testing.assert_array_equal(found[name], value)
    del weights["stem.conv.weight"]
    with pytest.raises(UsageError, match=r"lack 1 of .* first stem\.conv\.weight"):
        load_weights(SPEC, weights, np.dtype(np.float32))


def test_the_command_trains_and_goes_on(tmp_path: Path) -> None:
    """Uneven last batches, a checkpoint, and a continuation with another number of ranks."""
    arguments = (
        *("train", "--framework=jax", "--data=digits", "--image-size=8", "--threads=1", "--no-report"),
        *("--epochs=4", f"--output-dir={tmp_path}"),
    )
    for more in (["-np=2", "--batch-size=32", "--limit-steps=70"], ["--batch-size=64", "--resume"]):
        command = [sys.executable, "-m", "multiring", *arguments, *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["ranks"] == 1
    assert summary["test_accuracy"] > 0.9
