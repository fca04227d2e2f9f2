"""Which engine starts the ranks of `multiring run`, and what it is told."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from multiring import cli
from multiring.errors import UsageError
from multiring.launch_environment import Placement
from multiring.launcher import engine_job, engine_rank
from multiring.launcher.engine_job import heard_ends
from multiring.launcher.engines import MPICH, OPEN_MPI, SRUN, Engine, choose
from multiring.launcher.hosts import HostSlots
from multiring.launcher.remote_ranks import SSH
from multiring.launcher.report import RankEnd, blame
from multiring.store import TcpStore, TcpStoreServer

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
    path = directory / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return str(path)


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
    words = " ".join(command)
    expected = {
        SRUN: [
            "--nodes 2 --ntasks 4 --ntasks-per-node 2",
            "--nodelist ,b",
            "--overcommit",
            "--cpu-bind none",
        ],
        OPEN_MPI: ["-n 3 --host :2,b:1 --map-by slot:OVERSUBSCRIBE --bind-to none -x A -x SECRET"],
        MPICH: ["-n 3 -hosts :2,b:1 -localhost 10.0.0.1 -genvlist A,SECRET"],
    }
    assert all(option in words for option in expected[kind])


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
        engine_rank._place([2, 1], given("slurm", 2 * host + local, 4, local, host))
        for host, local in [(0, 0), (0, 1), (1, 0), (1, 1)]
    ]
    seats = [
        place and (place.rank, place.size, place.seat.local_rank, place.seat.local_size) for place in found
    ]
    assert seats == [(0, 3, 0, 2), (1, 3, 1, 2), (2, 3, 0, 1), None]
    place = engine_rank._place([2, 1], given("openmpi", 2, 3))
    assert place is not None
    assert (place.rank, place.seat.cross_rank, place.seat.local_size) == (2, 1, 1)
    for wrong in (given("openmpi", 0, 1), given("slurm", 0, 3), given("slurm", 4, 4, 0, 2)):
        with pytest.raises(UsageError, match="start it by --engine ssh"):
            engine_rank._place([2, 1], wrong)


def test_an_engine_that_is_not_known_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["run", "-np", "2", "--engine", "pbs", "train.py"])
    assert "invalid choice: 'pbs'" in capsys.readouterr().err


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
    srun = tmp_path / "srun"
    srun.write_text(f"#!/bin/sh\nuntil [ -e {tmp_path}/said ]; do sleep 0.02; done\nexit 3\n")
    srun.chmod(0o755)
    assert cli.main(["run", "--engine", "srun", "-np", "1", "--timeout", "30", "true"]) == 3
    first, second = said
    assert first.startswith(f"{srun} has not started a rank within 0.1 s: it waits, perhaps for other steps")
    assert second.startswith(f"{srun} ended with exit code 3 after ")


LOST = "multiring.errors.PeerLostError: rank 2 on b is gone"
BROKEN = "RuntimeError: rank 2 is gone"  # a framework's, which does not say that it is ours


def blamed(told: Sequence[tuple[str, int] | tuple[str, int, int] | tuple[str, int, int, str]]) -> RankEnd:
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


def test_the_first_to_fail_is_blamed_whoever_tells_more_first() -> None:
    first = [("failed", 2), ("failed", 0), ("end", 0, 1, BROKEN), ("end", 2, 3), ("failed", 1), ("end", 1, 1)]
    assert blamed(first).rank == 2
    assert blamed([("end", 1, 127), ("end", 0, 127)]).rank == 1, "they have not even started"


def test_who_lost_another_is_not_blamed_though_heard_first() -> None:
    assert blamed([("failed", 0), ("end", 0, 1, LOST), ("failed", 2), ("end", 2, 3)]).rank == 2
    crashed = [("failed", 0), ("failed", 2), ("end", 0, 1, BROKEN), ("end", 2, -signal.SIGSEGV)]
    assert blamed(crashed).rank == 2, "nothing else brings a signal about"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_the_engine_ends_is_not_blamed(number: int) -> None:
    """It does so when it has heard of a failure, and we hear of that before."""
    by_it = [("failed", 2), ("end", 2, 3), ("exit", 2), ("failed", 0), ("end", 0, -number), ("exit", 0)]
    assert blamed(by_it).rank == 2
    before_it = [("failed", 2), ("end", 2, 1, BROKEN), ("failed", 0), ("exit", 2), ("end", 0, -number)]
    assert blamed(before_it).rank == 0, "nobody had told the engine"
    in_vain = [("failed", 1), ("end", 1, 1, LOST), ("exit", 1), ("failed", 0), ("end", 0, -number)]
    assert blamed(in_vain).rank == 1
