"""The example script on what is as particular as pycaffe."""

from __future__ import annotations

from tests.adapters.test_examples import accuracy
from tests.support import REPOSITORY

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


def test_the_example_runs_on_pycaffe() -> None:
    assert accuracy(WITH_PYCAFFE, 2, env={"PYTHONPATH": str(REPOSITORY)}) > 0.85
