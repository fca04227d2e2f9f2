"""Typos in names that modules take from their parts on first use."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "typo", "meant"),
    [
        ("multiring", "iinit", "init"),
        ("multiring.jax", "distribut", "distribute"),
        ("multiring.tensorflow", "DistributedOptimiser", "DistributedOptimizer"),
        ("multiring.torch", "broadcast_parameter", "broadcast_parameters"),
    ],
)
def test_python_suggests_the_name_that_was_meant(module: str, typo: str, meant: str) -> None:
    script = f"import {module}\n{module}.{typo}\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"has no attribute '{typo}'. Did you mean: '{meant}'?" in done.stderr
