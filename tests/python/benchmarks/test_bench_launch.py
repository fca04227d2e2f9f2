"""How `multiring bench` starts its ranks: which mpirun, which peers, processors, ends; `--mpich`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from multiring import machine
from multiring.benchmarks import launch, mpich
from multiring.benchmarks.companion import LINE, Barrier, flags_of
from multiring.benchmarks.launch import Mpirun
from multiring.benchmarks.mpich import MpichEnvironment, find_mpich
from multiring.errors import UsageError
from multiring.rendezvous import launch_environment
from multiring.rendezvous.launch_environment import Placement
from tests.python.benchmarks.test_bench import bench, measured
from tests.support import REPOSITORY, Job, executable, wait_until

ALONE = launch_environment.detect({})
VERSIONS = {
    "openmpi": "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/",
    "mpich": "HYDRA build details:\n    Version:   4.2.1",
    "other": "mpirun of somebody",
}


def fake(directory: Path, kind: str) -> Path:
    directory.mkdir(exist_ok=True)
    return executable(directory / "mpirun", f"cat <<'END'\n{VERSIONS[kind]}\nEND")


def test_the_mpirun_of_the_library_is_chosen(tmp_path: Path) -> None:
    openmpi, mpich, other = (fake(tmp_path / kind, kind) for kind in VERSIONS)
    assert launch.find_mpirun("MPICH", [openmpi, mpich]) == Mpirun(mpich, "MPICH")
    assert launch.find_mpirun("Open MPI", [mpich, openmpi]) == Mpirun(openmpi, "Open MPI")
    # One that does not say whose it is may be the right one.
    assert launch.find_mpirun("MPICH", [openmpi, other]) == Mpirun(other, "")
    told = rf"mpi4py uses MPICH, .*{openmpi} belongs to Open MPI: run pip install"
    with pytest.raises(UsageError, match=told):
        launch.find_mpirun("MPICH", [openmpi])
    told = "no mpirun of it is beside .* or in PATH: run pip install mpi4py openmpi"
    with pytest.raises(UsageError, match=told):
        launch.find_mpirun("MPICH", [])
    openmpi.write_text("#!/no/such/program\n")
    assert launch.find_mpirun("MPICH", [openmpi]).vendor == ""


def test_a_peer_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "installed_peers", lambda: ["gloo"])
    with pytest.raises(UsageError, match="peer mpi needs mpi4py, .*: run pip install mpi4py openmpi"):
        launch.choose_peers(["gloo", "mpi"], "none")
    monkeypatch.setattr(launch, "installed_peers", list)
    with pytest.raises(UsageError, match="peer gloo needs torch, .*: run pip install torch"):
        launch.choose_peers(["gloo"], "none")
    assert launch.choose_peers([], "none") == []
    assert launch.choose_peers(None, "none") == []


def test_by_default_mpi_is_measured_where_it_can_be_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> Mpirun:
        raise UsageError("no mpirun")

    monkeypatch.setattr(launch, "installed_peers", lambda: ["gloo", "mpi"])
    monkeypatch.setattr(launch, "find_mpirun", lambda: Mpirun(Path("mpirun"), ""))
    for launcher in ("none", "openmpi", "mpich"):
        assert launch.choose_peers(None, launcher) == ["gloo", "mpi"]
    for launcher in ("multiring", "torchrun"):
        assert launch.choose_peers(None, launcher) == ["gloo"]
        with pytest.raises(UsageError, match=f"{launcher} has started these: leave the start"):
            launch.choose_peers(["mpi"], launcher)
    monkeypatch.setattr(launch, "find_mpirun", missing)
    assert launch.choose_peers(None, "none") == ["gloo"]
    assert capsys.readouterr().err == "multiring: MPI is not measured: no mpirun\n"
    with pytest.raises(UsageError, match="no mpirun"):
        launch.choose_peers(["mpi"], "none")


@pytest.mark.parametrize(
    ("cpus", "expected"),
    [
        ([0, 4, 1, 5], [0, 1]),  # 4 and 5 are the second hardware threads
        ([5, 7], [5, 7, 5]),
        ([3], [3, 3]),
    ],
)
def test_ranks_stay_on_processors_of_their_own(
    cpus: list[int], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[set[int]] = []
    monkeypatch.setattr(machine, "allowed_cpus", lambda: list(cpus))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, chosen: pinned.append(set(chosen)))
    size = len(expected)
    for rank in range(size):
        place: Placement = replace(ALONE, rank=rank, size=size, local_rank=rank, local_size=size)
        assert launch.pin(place) == cpus
    assert pinned == [{cpu} for cpu in expected]


@pytest.fixture
def mpi() -> None:
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed (pip install mpi4py openmpi)")
    try:
        launch.find_mpirun()
    except UsageError as error:
        pytest.skip(str(error))


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.mark.usefixtures("mpi")
def test_mpi_is_started_by_its_own_launcher_and_measured() -> None:
    before = shared_memory()
    words = ["--sizes=4KiB", "--peers=mpi", "--seconds=0.02", "--format=markdown"]
    done, files = measured(*words)
    report = json.loads(files["r.json"])
    assert report["launcher"] in ("openmpi", "mpich")
    (peer,) = report["rows"][0]["derived"]["ratios"]
    assert peer in report["machine"]["versions"]
    assert f"| {peer} |" in done.stdout
    assert shared_memory() <= before


@pytest.mark.usefixtures("mpi")
def test_a_signal_ends_all_ranks_of_mpi() -> None:
    before = shared_memory()
    words = ["--sizes=4,64MiB", "--peers=mpi", "--seconds=60"]
    with Job(bench(*words)) as job:
        assert any(line.startswith("4 B: ") for line in job.process.stderr)
        job.process.send_signal(signal.SIGTERM)
        job.ended(128 + signal.SIGTERM)
    wait_until(lambda: shared_memory() <= before, "the end of MPI's shared memory")


MPICH = REPOSITORY / "build" / "mpich"


def environment(directory: Path, check: str, mpiexec: str | None = "HYDRA build details:") -> Path:
    """One whose Python does as `check` says, in the words of sh."""
    (directory / "bin").mkdir(parents=True)
    scripts = {"python": check} | ({} if mpiexec is None else {"mpiexec": f"echo '{mpiexec}'"})
    for name, script in scripts.items():
        executable(directory / "bin" / name, script)
    return directory


def test_an_environment_or_its_python_is_given(tmp_path: Path) -> None:
    made = environment(tmp_path / "a", "printf MPICH")
    expected = MpichEnvironment(made / "bin" / "python", made / "bin" / "mpiexec")
    assert find_mpich(made) == find_mpich(made / "bin" / "python") == expected


@pytest.mark.parametrize(
    ("check", "mpiexec", "message"),
    [
        ("echo 'no mpi4py' >&2; exit 1", "HYDRA", r"cannot use MPICH \(no mpi4py\)"),
        ("printf 'Open MPI'", "HYDRA", "the mpi4py of .*bin/python uses Open MPI, not MPICH"),
        ("printf MPICH", "mpirun (Open MPI) 5.0", "no mpiexec of MPICH is beside .*bin/python or in PATH"),
    ],
)
def test_an_environment_without_mpich_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: str, mpiexec: str | None, message: str
) -> None:
    monkeypatch.setattr(mpich.shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match=f"--mpich {tmp_path}/a: .*{message}.*: make one by `python -m venv"):
        find_mpich(environment(tmp_path / "a", check, mpiexec))


def test_what_other_launchers_tell_their_ranks_is_not_told_to_mpich() -> None:
    others = {"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "PMI_FD": "3", "MULTIRING_RANK": "1"}
    kept = {"PATH": "/bin", "MULTIRING_JOB_ID": "a", "UCX_TLS": "tcp"}
    assert mpich.mpich_environment(others | kept) == kept


def test_the_barrier_lets_nobody_go_before_all_are_there() -> None:
    ranks, rounds = 3, 50
    flags = memoryview(bytearray(8 * LINE * ranks)).cast("q")
    arrived = [0] * ranks
    wrong = []

    def run(rank: int) -> None:
        barrier = Barrier(*flags_of(flags, rank, ranks), crowded=True)
        for number in range(1, rounds + 1):
            arrived[rank] = number
            barrier()
            wrong.extend(one for one in arrived if one < number)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_mpiexec_that_starts_nothing_ends_the_run(tmp_path: Path) -> None:
    made = environment(tmp_path / "a", "printf MPICH")
    mpiexec = made / "bin" / "mpiexec"
    mpiexec.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec echo HYDRA\necho "nothing here" >&2; exit 3\n'
    )
    words = ["--sizes", "4KiB", "--seconds", "0.02", "--peers", "none", "--mpich", str(made)]
    done = Job(bench(*words)).run(code=1)
    assert "nothing here\n" in done.stderr
    assert "InternalError: MPICH's rank 0 did not start (mpiexec ended with 3)" in done.stderr


def test_the_companion_needs_nothing_of_multiring() -> None:
    source = REPOSITORY / "benchmarks" / "companion.py"
    found = re.findall(r"^ *(?:import|from) ([a-z0-9_]+)", source.read_text(), re.MULTILINE)
    assert {"json", "numpy", "mpi4py"} <= set(found) <= {*sys.stdlib_module_names, "numpy", "mpi4py"}
