"""The ResNet in JAX: the same numbers as in Torch, and on several ranks the same as on one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from multiring import Communicator
from tests.python.models.trainer_contract import TrainerContract, make, whole_batch
from tests.support import run_multiring


class TestJaxTrainer(TrainerContract):
    framework = "jax"

    def test_smaller_batches_are_filled_up(self, comm: Communicator) -> None:
        trainers = [make(name, comm, seed=3, dtype="float64") for name in ("jax", "torch")]
        for count in (7, 2):
            batch = whole_batch(count, count=count)
            found, expected = (trainer.step(batch, 0.05) for trainer in trainers)
            assert found.loss == pytest.approx(expected.loss, rel=1e-9)
            assert (found.correct, found.count) == (expected.correct, count)
        for trainer in trainers:
            trainer.close()


def test_the_command_trains_and_goes_on(tmp_path: Path) -> None:
    """Uneven last batches, a checkpoint, and a continuation with another number of ranks."""
    arguments = (
        *("train", "--framework=jax", "--data=digits", "--image-size=8", "--threads=1", "--no-report"),
        *("--epochs=2", f"--output-dir={tmp_path}"),
    )
    run_multiring(*arguments, "-np=2", "--batch-size=32", "--limit-steps=24", timeout=200, code=0)
    run_multiring(*arguments, "--batch-size=64", "--limit-steps=26", "--resume", timeout=200, code=0)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["ranks"], summary["global_batch"], summary["steps"]) == (1, 64, 26)
