"""Which engine starts the ranks of `multiring run`, and what it is told."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from multiring import cli
from multiring.commands.launcher import engine_job, engine_rank
from multiring.commands.launcher.engine_job import heard_ends
from multiring.commands.launcher.engines import MPICH, OPEN_MPI, SRUN, Engine, choose
from multiring.commands.launcher.hosts import HostSlots
from multiring.commands.launcher.process import RankProcess
from multiring.commands.launcher.remote_ranks import SSH
from multiring.commands.launcher.report import RankEnd, blame, failure_report
from multiring.errors import PeerLostError, UsageError
from multiring.rendezvous.launch_environment import Placement
from multiring.store import TcpStore, TcpStoreServer
from tests.support import executable, wait_until

HERE = socket.gethostname()
TWO = [HostSlots("", 2), HostSlots("b", 1)]
ALLOCATION = [("b.cluster", 4), (HERE, 4), ("c", 4)]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory with programs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "elsewhere/python"))
    return tmp_path


def add(directory: Path, name: str, says: str = "") -> str:
    return str(executable(directory / name, f"echo '{says}'"))


def test_srun_is_chosen_where_slurm_has_allocated_the_hosts(programs: Path) -> None:
    assert choose("auto", TWO, ALLOCATION) is None  # there is no srun
    srun = add(programs, "srun")
    # By Slurm's names and in its order, in which it numbers tasks.
    expected = Engine(SRUN, srun, [HostSlots("b.cluster", 1), HostSlots(HERE, 2)])
    assert choose("auto", TWO, ALLOCATION) == expected
    assert choose("srun", TWO, ALLOCATION) == expected
    assert choose("ssh", TWO, ALLOCATION) is None
    assert choose("auto", TWO, None) is None
    assert choose("auto", TWO, [(HERE, 4)]) is None
    assert choose("auto", [HostSlots("", 2)], ALLOCATION) is None, "this host alone needs nobody"


def test_an_mpirun_is_never_chosen_unasked(programs: Path) -> None:
    path = add(programs, "mpirun", "mpirun (Open MPI) 5.0.11")
    assert choose("auto", TWO, None) is None
    assert choose("mpirun", TWO, None) == Engine(OPEN_MPI, path, [HostSlots(HERE, 2), HostSlots("b", 1)])
    add(programs, "mpirun", "HYDRA build details:")
    assert getattr(choose("mpirun", TWO, None), "kind", None) == MPICH


def test_what_cannot_be_is_told(programs: Path) -> None:
    with pytest.raises(UsageError, match="none beside this Python or in PATH: install Open MPI or MPICH"):
        choose("mpirun", TWO, None)
    with pytest.raises(UsageError, match="there is no srun in PATH"):
        choose("srun", TWO, ALLOCATION)
    add(programs, "srun")
    with pytest.raises(UsageError, match="use it under salloc or sbatch"):
        choose("srun", TWO, None)
    with pytest.raises(UsageError, match=f"hosts of Slurm's allocation only: {HERE}, c"):
        choose("srun", TWO, [(HERE, 4), ("c", 4)])
    add(programs, "mpirun", "poe 5.2")
    with pytest.raises(UsageError, match="is neither Open MPI's nor MPICH's: poe 5.2"):
        choose("mpirun", TWO, None)


@pytest.mark.parametrize("kind", [SRUN, OPEN_MPI, MPICH])
def test_the_command_names_hosts_and_variables_and_no_values(kind: str) -> None:
    command = Engine(kind, "/opt/engine", TWO).command(["python", "x y"], ["A", "SECRET"], "10.0.0.1")
    assert command[0] == "/opt/engine"
    assert command[-2:] == ["python", "x y"]
    expected = {
        SRUN: "--nodes 2 --ntasks 4 --ntasks-per-node 2 --nodelist ,b --distribution block",
        OPEN_MPI: "-n 3 --host :2,b:1 --map-by slot:OVERSUBSCRIBE --bind-to none -x A -x SECRET",
        MPICH: "-n 3 -hosts :2,b:1 -localhost 10.0.0.1 -genvlist A,SECRET",
    }
    assert expected[kind] in " ".join(command)


def test_the_environment_of_an_engine() -> None:
    given = {"PATH": "/bin", "SLURM_NTASKS_PER_NODE": "7", "SLURM_JOB_ID": "1"}
    assert Engine(SRUN, "srun", TWO).environ(given, []) == {"PATH": "/bin", "SLURM_JOB_ID": "1"}
    assert Engine(MPICH, "mpirun", TWO).environ(given, []) == given
    assert Engine(MPICH, "mpirun", TWO).environ(given, shlex.split(SSH)) == given
    assert Engine(MPICH, "mpirun", TWO).environ(given, ["rsh"])["HYDRA_LAUNCHER_EXEC"] == "rsh"
    with pytest.raises(UsageError, match="MPICH's mpirun takes one word for --ssh, not 'ssh -p 22'"):
        Engine(MPICH, "mpirun", TWO).environ(given, ["ssh", "-p", "22"])
    own = Engine(OPEN_MPI, "mpirun", TWO).environ(given, ["ssh", "-p", "22"])
    assert own["PRTE_MCA_plm_ssh_agent"] == own["OMPI_MCA_plm_rsh_agent"] == "ssh -p 22"
    assert ("OMPI_ALLOW_RUN_AS_ROOT" in own) == (os.geteuid() == 0)
    assert "PRTE_MCA_plm_ssh_agent" not in Engine(OPEN_MPI, "mpirun", TWO).environ(given, shlex.split(SSH))


def given(launcher: str, rank: int, size: int, local: int = 0, host: int = 0) -> Placement:
    return Placement(rank, size, local, 2, host, 2, launcher, "", None, "job")


def test_a_rank_finds_its_place_on_uneven_hosts() -> None:
    """Slurm has started two tasks on each host, of which the second one on the second host is too many."""
    found = [
        engine_rank._assignment([2, 1], given("slurm", 2 * host + local, 4, local, host))
        for host, local in [(0, 0), (0, 1), (1, 0), (1, 1)]
    ]
    rank_slots = [
        place and (place.rank, place.size, place.slot.local_rank, place.slot.local_size) for place in found
    ]
    assert rank_slots == [(0, 3, 0, 2), (1, 3, 1, 2), (2, 3, 0, 1), None]
    place = engine_rank._assignment([2, 1], given("openmpi", 2, 3))
    assert (place.rank, place.slot.cross_rank, place.slot.local_size) == (2, 1, 1)
    for wrong in (given("openmpi", 0, 1), given("slurm", 0, 3), given("slurm", 4, 4, 0, 2)):
        with pytest.raises(UsageError, match="start it by --engine ssh"):
            engine_rank._assignment([2, 1], wrong)


def test_an_engine_that_waits_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun itself is quiet about it."""
    said: list[str] = []

    def say(lines: Sequence[str]) -> None:
        said.extend(lines)
        (tmp_path / "said").touch()

    monkeypatch.setattr(engine_job, "say", say)
    monkeypatch.setattr(engine_job, "_START_SECONDS", 0.1)
    monkeypatch.setenv("SLURM_JOB_NODELIST", HERE)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    srun = executable(tmp_path / "srun", f"until [ -e {tmp_path}/said ]; do sleep 0.02; done\nexit 3")
    assert cli.main(["run", "--engine", "srun", "-np", "1", "--timeout", "30", "true"]) == 3
    first, second = said
    assert first.startswith(f"{srun} has not started a rank within 0.1 s: it waits, perhaps for other steps")
    assert second.startswith(f"{srun} ended with exit code 3 after ")


# A launcher's store, and what an engine starts, whose patience with a silent launcher is short.
SERVE = f"""
import sys
from multiring.store import TcpStoreServer
with TcpStoreServer("127.0.0.1", 0, b"{"x" * 16}") as server:
    print(server.port, flush=True)
    sys.stdin.read()
"""
SEE_THROUGH = """
import sys
from multiring.store import tcp
from multiring.commands.launcher import engine_rank
tcp._REPLY_GRACE = 0.2
sys.exit(engine_rank.main())
"""


class EngineRank:
    """A rank that waits for a file, started as Open MPI does, and the process that serves the store."""

    def __init__(self, directory: Path, processes: ExitStack) -> None:
        self.directory = directory
        wait = f"touch {directory}/ready; until [ -e {directory}/go ]; do sleep 0.02; done; exit 5"
        order = dict.fromkeys(("module", "output_dir", "tag_output", "devices"), None)
        order |= {"program": ["sh", "-c", wait], "bind": "none", "directory": str(directory), "hosts": [1]}
        order |= {"coloured": False, "stdin": False}
        pipe = subprocess.PIPE
        serve = [sys.executable, "-c", SERVE]
        self.server = processes.enter_context(subprocess.Popen(serve, stdin=pipe, stdout=pipe, text=True))
        processes.callback(self.server.kill)
        self.port = int(self.server.stdout.readline())
        environ = os.environ | {
            "OMPI_COMM_WORLD_RANK": "0",
            "OMPI_COMM_WORLD_SIZE": "1",
            "MULTIRING_STORE": f"tcp://127.0.0.1:{self.port}",
            "MULTIRING_SECRET": ("x" * 16).encode().hex(),
        }
        start = [sys.executable, "-c", SEE_THROUGH, json.dumps(order)]
        self.process = processes.enter_context(
            subprocess.Popen(start, env=environ, stderr=pipe, stdout=pipe, text=True)
        )
        processes.callback(self.process.kill)
        wait_until((directory / "ready").exists, "the start of the rank")

    def store(self) -> TcpStore:
        return TcpStore("127.0.0.1", self.port, b"x" * 16)


@pytest.fixture
def engine_rank_process(tmp_path: Path) -> Iterator[EngineRank]:
    with ExitStack() as processes:
        yield EngineRank(tmp_path, processes)


def test_a_launcher_that_stands_still_is_waited_for(engine_rank_process: EngineRank) -> None:
    """A rank goes on meanwhile, and what becomes of it is told when the launcher goes on as well."""
    started = engine_rank_process
    with started.store() as store:
        store.get(engine_rank.STARTED, 30.0)
        os.kill(started.server.pid, signal.SIGSTOP)
        (started.directory / "go").touch()
        with pytest.raises(subprocess.TimeoutExpired):  # ten times its patience
            started.process.wait(2)
        os.kill(started.server.pid, signal.SIGCONT)
        assert started.process.wait(30) == 5
        end = RankEnd(**json.loads(store.get(engine_rank.end_key(0), 0.0)))
    assert (end.code, end.by_launcher, end.why) == (5, False, "")


def test_a_rank_that_had_to_end_without_the_launcher_says_so(tmp_path: Path) -> None:
    class Lost(TcpStore):
        def get(self, key: str, timeout: float, interrupt: object = None) -> bytes:
            raise PeerLostError("the store is gone (connection timed out)")

    command = ["sh", "-c", "exec sleep 3600.6"]
    arrived = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: arrived.append(number))
    process = RankProcess(0, command, os.environ, cpus=None, stdin=False, piped=False)
    try:
        listener = engine_rank._Listener(Lost.__new__(Lost), process)
        listener.run()
        assert arrived == [signal.SIGTERM], "as if the engine had ended it"
    finally:
        signal.signal(signal.SIGTERM, before)
        process.signal_group(signal.SIGKILL)
        wait_until(process.look, "its end")
        process.release()
    end = RankEnd(0, 1, -signal.SIGTERM, False, [], "b", listener.lost)
    report = failure_report(end, [end], host=HERE, seconds=31.0, oom_kills=0)
    assert report == [
        "rank 0 (on b) failed with signal SIGTERM after 31.0 s",
        "  ended on its host, because the launcher was lost: the store is gone (connection timed out)",
    ]


LOST = "multiring.errors.PeerLostError: rank 2 on b is gone"
BROKEN = "RuntimeError: rank 2 is gone"  # a framework's, which does not say that it is ours
Told = tuple[str, int] | tuple[str, int, int] | tuple[str, int, int, str]


def blamed(told: Sequence[Told]) -> RankEnd:
    """Whom a launcher blames that has heard, in order, ("failed", rank), ("end", rank, code, words) or
    ("exit", rank)."""
    with (
        TcpStoreServer("127.0.0.1", 0, b"x" * 16) as server,
        TcpStore("127.0.0.1", server.port, b"x" * 16) as store,
    ):
        for what, rank, *rest in told:
            if what != "end":
                store.set({"failed": engine_rank.failure_key, "exit": engine_rank.exit_key}[what](rank), b"")
            else:
                code, *words = rest
                end = RankEnd(rank, 100 + rank, int(code), False, list(map(str, words)), f"host{rank}")
                store.set(engine_rank.end_key(rank), json.dumps(vars(end)).encode())
        return blame([end for end in heard_ends(server, store) if end.code and not end.by_launcher])


FIRST = ("failed", 0), ("end", 0, 1, BROKEN)


@pytest.mark.parametrize(
    ("told", "rank"),
    [
        # The first to fail, in whatever order the rest is heard.
        ([("failed", 2), *FIRST, ("end", 2, 3), ("failed", 1), ("end", 1, 1)], 2),
        # They have not even started.
        ([("end", 1, 127), ("end", 0, 127)], 1),
    ],
)
def test_the_one_that_failed_by_itself_is_blamed(told: list[Told], rank: int) -> None:
    assert blamed(told).rank == rank


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_the_engine_ends_is_not_blamed(number: int) -> None:
    """It does so when it has heard of a failure, and we hear of that before."""
    ended: list[Told] = [("failed", 0), ("end", 0, -number)]
    assert blamed([("failed", 2), ("end", 2, 3), ("exit", 2), *ended, ("exit", 0)]).rank == 2
    assert blamed([("failed", 1), ("end", 1, 1, LOST), ("exit", 1), *ended]).rank == 1
    before_it: list[Told] = [("failed", 2), ("end", 2, 1, BROKEN), ended[0], ("exit", 2), ended[1]]
    assert blamed(before_it).rank == 0, "nobody had told the engine"
