"""The example scripts."""

from __future__ import annotations

import pytest

from tests.support import REPOSITORY, run_job


@pytest.mark.parametrize("script", ["jax_digits.py", "flax_digits.py"])
def test_the_example_learns_the_digits(script: str) -> None:
    result = run_job(2, REPOSITORY / "examples" / script, timeout=120.0)
    assert result.returncode == 0, result.stderr
    line = next(line for line in result.stdout.splitlines() if "test accuracy" in line)
    assert "2 ranks" in line
    assert float(line.split()[-1]) > 0.97
