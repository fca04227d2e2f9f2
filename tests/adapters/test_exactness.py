"""Data-parallel training computes what one rank computes.

In float64 and with synchronised batch normalisation N ranks of batch B follow one rank of batch N*B up to the
rounding of sums that are added in another order; the same job gives the same bits every time; and all ranks
hold the same bits after every step.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from multiring import Communicator
from multiring.models.train import train
from multiring.models.training.options import TrainOptions, add_arguments
from multiring.models.training.report import read_metrics
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]

BATCH = 16
STEPS = 30
# Verifying at every step raises on every rank where the bits of any two differ.
OPTIONS = [
    *("--depth=8", "--data=digits", "--image-size=8", "--dtype=float64", "--threads=1", "--no-report"),
    *("--epochs=4", "--warmup-epochs=0", "--log-every=1", "--verify-every=1", "--checkpoint-every=100"),
]


def train_here(comm: Communicator, directory: str, *arguments: str) -> dict[str, Any]:
    """Run `multiring train` inside a rank; losses and hashes of all steps, and the final state's hash."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parsed = parser.parse_args([*OPTIONS, f"--output-dir={directory}", *arguments])
    result = train(TrainOptions.from_namespace(parsed), comm)
    comm.barrier()
    steps = [record for record in read_metrics(f"{directory}/metrics.jsonl") if record["kind"] == "step"]
    return {
        "losses": [record["loss"] for record in steps],
        "hashes": [record["fingerprint"] for record in steps],
        "final": result.fingerprint,
        "test": (result.test.loss, result.test.correct, result.test.count),
    }


def train_on(ranks: Ranks, size: int, *arguments: str, directory: str | None = None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        results = ranks(size).run(train_here, directory or temporary, *arguments)
    assert all(result == results[0] for result in results)
    return dict(results[0])


@pytest.fixture(scope="module")
def two(ranks: Ranks) -> dict[str, Any]:
    """30 steps of two ranks."""
    return train_on(ranks, 2, f"--batch-size={BATCH}", f"--limit-steps={STEPS}")


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_train_like_one_rank_with_the_whole_batch(ranks: Ranks, size: int, two: dict[str, Any]) -> None:
    limit = f"--limit-steps={STEPS}"
    several = two if size == 2 else train_on(ranks, size, f"--batch-size={BATCH}", limit)
    one = train_on(ranks, 1, f"--batch-size={size * BATCH}", limit)
    assert len(one["losses"]) == len(several["losses"]) == STEPS
    assert several["losses"] == pytest.approx(one["losses"], rel=1e-10, abs=0)
    # The network learns: agreement is not that of something that stands still.
    assert sum(one["losses"][-5:]) < 0.8 * sum(one["losses"][:5])
    assert several["test"][1:] == one["test"][1:]
    assert several["test"][0] == pytest.approx(one["test"][0], rel=1e-8)


def test_uneven_and_empty_parts_of_a_batch_are_weighted_by_their_samples(ranks: Ranks) -> None:
    # 1,433 images in global batches of 477 leave 2 for the fourth step, of which a third rank gets none.
    arguments = ("--limit-steps=6", "--image-size=8")
    three = train_on(ranks, 3, "--batch-size=159", *arguments)
    one = train_on(ranks, 1, "--batch-size=477", *arguments)
    assert three["losses"] == pytest.approx(one["losses"], rel=1e-10, abs=0)


def test_an_empty_part_is_harmless_where_each_rank_normalises_for_itself(ranks: Ranks) -> None:
    arguments = ("--batch-size=159", "--limit-steps=6", "--no-sync-bn")
    first, again = train_on(ranks, 3, *arguments), train_on(ranks, 3, *arguments)
    assert first == again


@pytest.mark.parametrize("variant", [(), ("--no-sync-bn",)])
def test_the_same_job_gives_the_same_bits(
    ranks: Ranks, two: dict[str, Any], variant: tuple[str, ...]
) -> None:
    arguments = (f"--batch-size={BATCH}", f"--limit-steps={STEPS if not variant else 10}", *variant)
    first = two if not variant else train_on(ranks, 2, *arguments)
    assert train_on(ranks, 2, *arguments) == first
    assert len(set(first["hashes"])) == len(first["hashes"])


def test_a_resumed_job_is_the_uninterrupted_one_bit_for_bit(
    ranks: Ranks, two: dict[str, Any], tmp_path: Path
) -> None:
    batch, directory = f"--batch-size={BATCH}", str(tmp_path)
    train_on(ranks, 2, batch, "--limit-steps=13", directory=directory)
    resumed = train_on(ranks, 2, batch, f"--limit-steps={STEPS}", "--resume", directory=directory)
    assert resumed == two


def test_fresh_processes_give_the_same_bits(two: dict[str, Any], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "multiring", "train", "-np", "2", *OPTIONS, f"--output-dir={tmp_path}"]
    command += [f"--batch-size={BATCH}", f"--limit-steps={STEPS}"]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    steps = [record for record in read_metrics(tmp_path / "metrics.jsonl") if record["kind"] == "step"]
    assert [record["fingerprint"] for record in steps] == two["hashes"]
    assert f"({two['test'][1]} of {two['test'][2]})" in done.stdout
