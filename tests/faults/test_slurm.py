"""Jobs under Debian's Slurm, on emulated hosts: srun, sbatch."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiring.benchmarks.emulation import hosts as emulated_hosts
from multiring.benchmarks.emulation.hosts import EmulatedHosts
from tests import slurm_cluster
from tests.slurm_cluster import SlurmCluster
from tests.support import REPOSITORY, Job, run_job, wait_until

# Says where it is and what it has computed; srun breaks long lines.
SUM = """
import hashlib, json, socket, sys
import numpy as np, multiring
comm = multiring.init()
total = comm.allreduce(np.random.default_rng(comm.rank).standard_normal(50_000))
place = [comm.rank, comm.size, comm.local_rank, comm.local_size, comm.cross_rank, comm.cross_size]
digest = hashlib.sha256(total.tobytes()).hexdigest()
sys.stdout.write(json.dumps([place, socket.gethostname(), digest, sys.argv[1:]]) + "\\n")
"""
PLACES = [[0, 4, 0, 2, 0, 2], [1, 4, 1, 2, 0, 2], [2, 4, 0, 2, 1, 2], [3, 4, 1, 2, 1, 2]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """Slurm on two hosts; skips where there can be none."""
    if reason := emulated_hosts.why_not() or slurm_cluster.why_not():
        pytest.skip(reason)
    with EmulatedHosts(2) as hosts, SlurmCluster(hosts) as started:
        yield started
        # Slurm takes note of a killed job's end after srun itself has ended.
        wait_until(lambda: started.run("squeue", "-h") == "", "the end of all jobs")


def start(cluster: SlurmCluster, script: Path, *words: str) -> Job:
    """Runs words on the first host, `SCRIPT` stands for the script's path; the home directory is empty."""
    environ = {
        **cluster.environ,
        "PATH": f"{Path(sys.executable).parent}:{cluster.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "HOME": str(script.parent),
    }
    command = [str(script) if word == "SCRIPT" else word for word in words]
    return Job(lambda root: cluster.command(0, command), environ, cwd=REPOSITORY)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SUM)
    return path


def results(output: str) -> list[list[object]]:
    return sorted((json.loads(line) for line in output.splitlines()), key=lambda result: result[0])


def test_srun_starts_ranks_that_find_each_other(cluster: SlurmCluster, script: Path) -> None:
    words = ("srun", "-N", "2", "--ntasks-per-node", "2", "python", "SCRIPT", "--flag")
    done = start(cluster, script, *words).run(code=0)
    found = results(done.stdout)
    assert [place for place, *_ in found] == PLACES
    assert [host for _, host, *_ in found] == ["emulated0", "emulated0", "emulated1", "emulated1"]
    here = results(run_job(4, SUM, "--flag", launcher_args=["--no-tag-output"]).stdout)
    assert [rest for _, _, *rest in found] == [rest for _, _, *rest in here], "the same bits as on one host"


def test_sbatch_runs_the_example(cluster: SlurmCluster, script: Path, tmp_path: Path) -> None:
    output = tmp_path / "job.out"
    with start(cluster, script, "sbatch", "-o", str(output), "examples/slurm.sbatch", "SCRIPT", "x y") as job:
        done = job.finish()
        assert done.returncode == 0, done.stderr
        wait_until(lambda: cluster.run("squeue", "-h") == "", "the end of the job")
        job.assert_nothing_left()
    found = results(output.read_text())
    assert [place for place, *_ in found] == PLACES
    assert all(arguments == ["x y"] for *_, arguments in found)


def test_a_rank_that_is_killed_under_srun_ends_all(cluster: SlurmCluster, script: Path) -> None:
    script.write_text(
        "import os, multiring\nc = multiring.init()\nif c.rank == 2: os.kill(os.getpid(), 9)\nc.barrier()\n"
    )
    words = ("srun", "-N", "2", "--ntasks-per-node", "2", "python", "SCRIPT")
    assert "PeerLostError" in start(cluster, script, *words).run(code=128 + 9).stderr


def test_ctrl_c_of_srun_ends_all_ranks(cluster: SlurmCluster, script: Path) -> None:
    script.write_text(
        "import os\nimport multiring\nc = multiring.init()\nc.barrier()\n"
        "open(os.environ['TEST_DIRECTORY'] + f'/ready{c.rank}', 'w').close()\n"
        "while True: c.barrier()\n"
    )
    with start(cluster, script, "srun", "-N", "2", "-n", "2", "python", "SCRIPT") as job:
        for rank in range(2):
            job.wait_for_file(f"ready{rank}")
        os.kill(job.process.pid, signal.SIGTERM)
        done = job.finish()
        job.assert_nothing_left()
    assert done.returncode != 0
