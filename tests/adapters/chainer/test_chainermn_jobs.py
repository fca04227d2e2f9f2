"""`chainermn` in jobs of its own processes: without MPI, beside it, and when a rank fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import run_job

MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")

WITHOUT_MPI = """
import sys
sys.modules["mpi4py"] = None  # as if it were not installed
import multiring.chainer
import chainer, chainermn, numpy as np

comm = multiring.chainer.create_communicator()
layer = chainermn.links.MultiNodeBatchNormalization(3, comm)
layer(np.ones((2, 3), np.float32))
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm)
try:
    chainermn.create_multi_node_optimizer(optimizer, comm, double_buffering=True)
except ValueError as error:
    assert "does not support double buffering" in str(error)
for name in ("pure_nccl", "naive"):
    try:
        chainermn.create_communicator(name, mpi_comm="any")
    except ImportError as error:
        assert "mpi4py" in str(error), error
    else:
        raise AssertionError(f"{name} was made without MPI")
assert not any(name.startswith("mpi4py.") for name in sys.modules)
print("done")
"""


def test_mpi_is_not_needed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_MPI)
    result = run_job(2, script)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("done") == 2


BESIDE_MPI = """
import sys
import multiring.chainer
import chainermn, numpy as np

comm = multiring.chainer.create_communicator()
layer = chainermn.links.MultiNodeBatchNormalization(3, comm)
assert "mpi4py.MPI" not in sys.modules
theirs = chainermn.create_communicator("naive")
np.testing.assert_array_equal(theirs.allreduce(np.ones(3)), comm.allreduce(np.ones(3)))
chainermn.links.MultiNodeBatchNormalization(3, theirs)(np.ones((2, 3), np.float32))
from mpi4py import MPI

both = multiring.chainer.create_communicator(mpi_comm=MPI.COMM_WORLD)
child = both.split(0, -both.rank)
assert child.mpi_comm.rank == child.rank == both.size - 1 - both.rank
assert (both.split(None if both.rank else 0, 0) is None) == bool(both.rank)
try:
    chainermn.create_communicator("pure_nccl")
except RuntimeError as error:
    assert "NCCL" in str(error)
print("done")
"""


@pytest.mark.skipif(MPIRUN is None or find_spec("mpi4py") is None, reason="mpirun or mpi4py is missing")
def test_beside_chainermns_own_communicators(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(BESIDE_MPI)
    variables = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    command = [str(MPIRUN), "-np", "2", sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2


EXCEPT_HOOK = """
import multiring.chainer
import chainermn

comm = multiring.chainer.create_communicator()
chainermn.global_except_hook.add_hook()
if comm.rank == 1:
    raise ArithmeticError("the loss has exploded")
comm.recv_obj(1)
"""


def test_the_global_except_hook_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(EXCEPT_HOOK)
    result = run_job(2, script)
    assert result.returncode != 0
    assert "ArithmeticError: the loss has exploded" in result.stderr
