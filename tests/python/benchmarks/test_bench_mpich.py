"""`multiring bench allreduce --mpich`: which environments it takes, and the companions of the ranks."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path

import pytest

from multiring.benchmarks import mpich
from multiring.benchmarks.companion import LINE, Barrier, flags_of
from multiring.benchmarks.mpich import MpichEnvironment, find_mpich
from multiring.errors import UsageError
from tests.python.benchmarks.test_bench import bench
from tests.support import REPOSITORY, Job, executable

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
