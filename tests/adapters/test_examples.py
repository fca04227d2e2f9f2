"""The example scripts learn the digits on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import REPOSITORY, run_job

EXAMPLES = sorted(path.name for path in (REPOSITORY / "examples").glob("*_digits.py"))


def accuracy(script: str | Path, size: int = 2, **options: object) -> float:
    """What a script of so many ranks prints as its test accuracy."""
    lines = run_job(size, script, timeout=120.0, code=0, **options).stdout.splitlines()
    line = next(line for line in lines if "test accuracy" in line)
    assert f"{size} ranks" in line
    return float(line.split()[-1])


@pytest.mark.parametrize("script", EXAMPLES)
def test_an_example_learns_the_digits(script: str) -> None:
    assert accuracy(REPOSITORY / "examples" / script) > 0.97


def test_a_language_model_learns_to_count() -> None:
    done = run_job(2, REPOSITORY / "examples/transformers_tiny.py", timeout=120.0, code=0)
    assert "2 ranks, accuracy of the next number 1.0000" in done.stdout


def test_a_loop_of_horovod_learns() -> None:
    script = REPOSITORY / "examples/horovod/tensorflow2_digits.py"
    assert accuracy(script, launcher_args=["--horovod"]) > 0.95
