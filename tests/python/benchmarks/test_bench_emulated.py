"""`multiring bench allreduce --emulate`: on hosts that are network namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from multiring.benchmarks.emulation.hosts import why_not
from tests.python.benchmarks.test_bench import bench, measured
from tests.python.benchmarks.test_bench_launch import MPICH
from tests.support import Job, executable, wait_until

HOLDER = b"cat\0-\0"  # what holds an emulated host


def processes(job: Job, command: bytes, variable: bytes = b"") -> list[int]:
    """Those of the job with that in their command line, and with that variable."""
    found = []
    for pid in job.processes():
        with contextlib.suppress(OSError):
            line, environ = (Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
            if command in line and (not variable or variable in environ.split(b"\0")):
                found.append(pid)
    return found


@pytest.fixture
def emulated() -> None:
    """Skips where no host can be emulated."""
    if reason := why_not():
        pytest.skip(reason)


@pytest.mark.usefixtures("emulated")
def test_emulated_hosts_are_measured_and_leave_nothing() -> None:
    words = ["--emulate", "2x2", "--rate", "400mbit,400mbit", "--sizes", "64KiB", "--seconds", "0.02"]
    words += ["--comm-dtype", "bfloat16", "--switch-queue", "1mb", "--tcp-streams"]
    done, files = measured(*words, "--peers", "mpi", "--format", "markdown")
    report = json.loads(files["r.json"])
    assert (report["ranks"], report["hosts"]) == (4, "2x2 --rate 400mbit,400mbit --switch-queue 1mb")
    rows = {row["contender"]: row for row in report["rows"]}
    assert list(rows) == ["multiring", "multiring bfloat16", "Open MPI", "TCP streams", "limit"]
    assert rows["limit"]["sample"]["median"] == 64 * 1024 / 100e6  # the array once, over both links
    sent = rows["multiring"]["sent"]
    assert sum(sent["eth0"]) + sum(sent["eth1"]) >= 2 * 64 * 1024
    assert "4 ranks of emulated hosts (2x2 --rate 400mbit,400mbit --switch-queue 1mb), all on" in done.stdout


@pytest.mark.usefixtures("emulated")
def test_emulated_hosts_end_with_a_bench_that_is_killed() -> None:
    words = ["--emulate", "2x1", "--sizes", "64KiB", "--seconds", "60", "--peers", "none"]
    with Job(bench(*words)) as job:
        wait_until(lambda: processes(job, HOLDER), "hosts")
        job.process.kill()
        job.finish()
        wait_until(lambda: not processes(job, HOLDER), "the end of the hosts")


@pytest.fixture
def with_mpich(emulated: None) -> list[str]:
    """Options of a run on two hosts of two ranks with MPICH; skips where that cannot be."""
    if not (MPICH / ".made").exists():
        pytest.skip("no environment with MPICH: ci/make_mpich_environment.sh makes one")
    return ["--emulate", "2x2", "--mpich", str(MPICH)]


def test_mpich_sends_between_hosts_and_shares_memory_within(with_mpich: list[str]) -> None:
    size = 256 * 1024
    words = ["--sizes", "256KiB", "--seconds", "0.02", "--peers", "gloo", "--format", "markdown"]
    done, files = measured(*with_mpich, *words)
    report = json.loads(files["r.json"])
    rows = {row["contender"]: row for row in report["rows"]}
    assert list(rows) == ["multiring", "Gloo", "MPICH", "limit"]
    assert "MPICH" in report["machine"]["versions"]
    assert "left out" not in done.stdout
    gloo, mpich = rows["Gloo"]["sent"], rows["MPICH"]["sent"]
    # One sum of each host crosses its link, in one direction and the other.
    assert all(size <= sent < 1.25 * size for sent in mpich["eth0"]), mpich
    # What uses TCP within a host crosses its loopback: Gloo's does, MPICH's does not.
    assert max(mpich["lo"]) < 1024, mpich
    assert min(gloo["lo"]) >= size, gloo


def test_a_rank_of_mpich_that_is_killed_ends_the_run(with_mpich: list[str]) -> None:
    before = set(Path("/dev/shm").glob("mpich_*"))
    words = ["--sizes", "4KiB,16MiB", "--seconds", "60", "--peers", "none"]
    with Job(bench(*with_mpich, *words)) as job:
        assert any(line.startswith("4 KiB: ") for line in job.process.stderr)
        (companion,) = processes(job, b"companion.py\0", b"PMI_RANK=1")  # takes the turns of that rank
        os.kill(companion, signal.SIGKILL)
        done = job.ended(1)
    assert "InternalError: MPICH's rank" in done.stderr
    assert set(Path("/dev/shm").glob("mpich_*")) <= before


@pytest.mark.usefixtures("emulated")
def test_a_host_that_cannot_be_made_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    fails = 'case "$*" in *eth1*) echo "RTNETLINK answers: No such thing" >&2; exit 2;; esac'
    executable(tmp_path / "tc", f'{fails}\nexec {shutil.which("tc")} "$@"')
    words = ["--emulate", "2x1", "--rate", "400mbit,400mbit", "--peers", "none"]
    done = Job(bench(*words), env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}).run(code=2)
    assert "multiring: the hosts 2x1 --rate 400mbit,400mbit cannot be emulated: `nsenter" in done.stderr
    assert "tc qdisc add dev eth1" in done.stderr
    assert "failed with exit code 2: RTNETLINK answers: No such thing" in done.stderr
    assert "Traceback" not in done.stderr
