"""The example script."""

from __future__ import annotations

from tests.support import REPOSITORY, run_job


def test_the_example_learns_the_digits() -> None:
    result = run_job(2, REPOSITORY / "examples" / "tensorflow_digits.py", timeout=120.0)
    assert result.returncode == 0, result.stderr
    line = next(line for line in result.stdout.splitlines() if "test accuracy" in line)
    assert "2 ranks" in line
    assert float(line.split()[-1]) > 0.97
