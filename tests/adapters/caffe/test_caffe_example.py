"""The example script, on the Caffe-style solver and on what is as particular as pycaffe."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from multiring.errors import UsageError
from tests.adapters.caffe import pycaffe_stand_in
from tests.python.caffe import caffe_nets
from tests.support import REPOSITORY, run_job

EXAMPLE = REPOSITORY / "examples" / "caffe_digits.py"

WITH_PYCAFFE = f"""
import importlib.util, sys
from tests.adapters.caffe import pycaffe_stand_in

sys.modules["caffe"] = pycaffe_stand_in
spec = importlib.util.spec_from_file_location("example", {str(EXAMPLE)!r})
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
assert example.SGDSolver is pycaffe_stand_in.SGDSolver
example.STEPS = 60
example.main()
"""


def test_the_example_learns_the_digits() -> None:
    result = run_job(2, EXAMPLE, timeout=120.0)
    assert result.returncode == 0, result.stderr
    line = next(line for line in result.stdout.splitlines() if "test accuracy" in line)
    assert "2 ranks" in line
    assert float(line.split()[-1]) > 0.97


@pytest.mark.parametrize("size", [1, 3])
def test_the_example_runs_on_pycaffe(size: int) -> None:
    result = run_job(size, WITH_PYCAFFE, timeout=120.0, env={"PYTHONPATH": str(REPOSITORY)})
    assert result.returncode == 0, result.stderr
    line = next(line for line in result.stdout.splitlines() if "test accuracy" in line)
    assert f"{size} ranks" in line
    assert float(line.split()[-1]) > 0.85


def test_the_stand_in_is_as_particular_as_pycaffe(tmp_path: Path) -> None:
    caffe_nets.make_solver(tmp_path, "test_iter: 1 test_interval: 1000 test_initialization: false")
    with pytest.raises(TypeError, match="str is expected, not PosixPath"):
        pycaffe_stand_in.SGDSolver(tmp_path / "solver.prototxt")  # type: ignore[arg-type]
    solver = pycaffe_stand_in.SGDSolver(str(tmp_path / "solver.prototxt"))
    images = np.random.default_rng(0).standard_normal((8, 2, 3, 3)).astype(np.float32)
    labels = np.arange(8, dtype=np.float32) % 3
    solver.net.set_input_arrays(images, labels)
    with pytest.raises(UsageError, match="has no data"):
        solver.step(1)
    net, test = solver.net, solver.test_nets[0]
    with pytest.raises(RuntimeError, match="float32"):
        net.set_input_arrays(images.astype(np.float64), labels)
    net.set_input_arrays(images, labels)
    solver.step(3)
    weights = [one.params["ip2"][0].data for one in (net, test)]
    assert not np.array_equal(*weights)
    test.share_with(solver.net)
    assert np.shares_memory(weights[0], test.params["ip2"][0].data)
    assert not hasattr(solver, "history")
