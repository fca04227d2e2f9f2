"""The example script."""

from __future__ import annotations

import pytest

from tests.support import REPOSITORY, run_job


@pytest.mark.parametrize("size", [1, 2])
def test_the_example_learns_the_digits(size: int) -> None:
    result = run_job(size, REPOSITORY / "examples" / "torch_digits.py", timeout=120.0)
    assert result.returncode == 0, result.stderr
    line = next(line for line in result.stdout.splitlines() if "test accuracy" in line)
    assert f"{size} ranks" in line
    assert float(line.split()[-1]) > 0.97
