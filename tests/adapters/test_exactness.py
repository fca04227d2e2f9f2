"""Data-parallel training computes what one rank computes.

In float64 and with synchronised batch normalisation N ranks of batch B follow one rank of batch N*B up to the
rounding of sums that are added in another order; the same job gives the same bits every time; and all ranks
hold the same bits after every step.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from multiring import Communicator
from multiring.models.train import train
from multiring.models.training.options import TrainOptions, add_arguments
from multiring.models.training.report import read_metrics
from tests.on_ranks import Pool
from tests.support import parsed, run_multiring

BATCH = 16
STEPS = 30
LIMITS = (f"--batch-size={BATCH}", f"--limit-steps={STEPS}")
# Verifying at every step raises on every rank where the bits of any two differ.
OPTIONS = [
    *("--depth=8", "--data=digits", "--image-size=8", "--dtype=float64", "--threads=1", "--no-report"),
    *("--epochs=4", "--warmup-epochs=0", "--log-every=1", "--verify-every=1", "--checkpoint-every=100"),
]


def of_steps(directory: str | Path, what: str) -> list[Any]:
    records = read_metrics(f"{directory}/metrics.jsonl")
    return [record[what] for record in records if record["kind"] == "step"]


def train_here(comm: Communicator, directory: str, *arguments: str) -> dict[str, Any]:
    """Run `multiring train` inside a rank; losses and hashes of all steps, and the final state's hash."""
    given = parsed(add_arguments, *OPTIONS, f"--output-dir={directory}", *arguments)
    result = train(TrainOptions.from_namespace(given), comm)
    comm.barrier()
    return {
        "losses": of_steps(directory, "loss"),
        "hashes": of_steps(directory, "fingerprint"),
        "final": result.fingerprint,
        "test": (result.test.loss, result.test.correct, result.test.count),
    }


def train_on(ranks: Pool, size: int, *arguments: str, directory: str | None = None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        results = ranks(size).run(train_here, directory or temporary, *arguments)
    assert all(result == results[0] for result in results)
    return dict(results[0])


@pytest.fixture(scope="module")
def two(ranks: Pool) -> dict[str, Any]:
    """30 steps of two ranks."""
    return train_on(ranks, 2, *LIMITS)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_train_like_one_rank_with_the_whole_batch(ranks: Pool, size: int, two: dict[str, Any]) -> None:
    several = two if size == 2 else train_on(ranks, size, *LIMITS)
    one = train_on(ranks, 1, *LIMITS, f"--batch-size={size * BATCH}")
    assert len(one["losses"]) == len(several["losses"]) == STEPS
    assert several["losses"] == pytest.approx(one["losses"], rel=1e-10, abs=0)
    # The network learns: agreement is not that of something that stands still.
    assert sum(one["losses"][-5:]) < 0.8 * sum(one["losses"][:5])
    assert several["test"][1:] == one["test"][1:]
    assert several["test"][0] == pytest.approx(one["test"][0], rel=1e-8)


# 1,433 images in global batches of 477 leave 2 for the fourth step, of which a third rank gets none.
UNEVEN = ("--batch-size=159", "--limit-steps=6")


def test_uneven_and_empty_parts_of_a_batch_are_weighted_by_their_samples(ranks: Pool) -> None:
    three = train_on(ranks, 3, *UNEVEN)
    one = train_on(ranks, 1, *UNEVEN, "--batch-size=477")
    assert three["losses"] == pytest.approx(one["losses"], rel=1e-10, abs=0)


@pytest.mark.parametrize(("size", "arguments"), [(2, LIMITS), (3, (*UNEVEN, "--no-sync-bn"))])
def test_the_same_job_gives_the_same_bits(
    ranks: Pool, two: dict[str, Any], size: int, arguments: tuple[str, ...]
) -> None:
    """Also where each rank normalises for itself, and one an empty part."""
    first = two if size == 2 else train_on(ranks, size, *arguments)
    assert train_on(ranks, size, *arguments) == first
    assert len(set(first["hashes"])) == len(first["hashes"])


def test_a_resumed_job_is_the_uninterrupted_one_bit_for_bit(
    ranks: Pool, two: dict[str, Any], tmp_path: Path
) -> None:
    train_on(ranks, 2, *LIMITS, "--limit-steps=13", directory=str(tmp_path))
    assert train_on(ranks, 2, *LIMITS, "--resume", directory=str(tmp_path)) == two


def test_fresh_processes_give_the_same_bits(two: dict[str, Any], tmp_path: Path) -> None:
    done = run_multiring("train", "-np", "2", *OPTIONS, f"--output-dir={tmp_path}", *LIMITS, code=0)
    assert of_steps(tmp_path, "fingerprint") == two["hashes"]
    assert f"({two['test'][1]} of {two['test'][2]})" in done.stdout
