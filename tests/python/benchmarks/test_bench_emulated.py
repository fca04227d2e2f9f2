"""`multiring bench allreduce --emulate`: on hosts that are network namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from multiring import machine
from multiring.benchmarks.emulation.capacity import why_too_many
from multiring.benchmarks.emulation.hosts import why_not
from multiring.cli import main
from tests.python.benchmarks.test_bench import bench, measured
from tests.python.benchmarks.test_bench_launch import MPICH
from tests.support import Job, Stopwatch, executable, wait_until

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


def namespaces(pids: list[int]) -> set[str]:
    """The network namespaces that processes are in, without that of this one."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
    return found - {os.readlink("/proc/self/ns/net")}


def all_processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


ENDS = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("number", "peers"),
    [*((number, "none") for number in ENDS), (signal.SIGKILL, "mpi"), (signal.SIGTERM, "mpi")],
)
def test_nothing_is_left_of_emulated_hosts_when_a_signal_ends_the_bench(number: int, peers: str) -> None:
    interfaces = set(os.listdir("/sys/class/net"))
    words = ["--emulate", "2x2", "--sizes", "4KiB,64MiB", "--seconds", "2", "--peers", peers]
    with Job(bench(*words)) as job:
        assert job.process.stderr is not None
        assert any(
            line.startswith("4 KiB: ") for line in job.process.stderr
        )  # it measures 64 MiB now, for 10 s and more
        hosts = namespaces(job.processes())
        assert len(processes(job, HOLDER)) == len(hosts) == 3  # two hosts, and the switch between them
        job.process.send_signal(number)
        watch = Stopwatch()
        job.ended(ENDS[number])
        assert watch.seconds() < 10
        wait_until(lambda: not hosts & namespaces(all_processes()), "the end of the namespaces")
        wait_until(lambda: set(os.listdir("/sys/class/net")) <= interfaces, "the end of the interfaces")


@pytest.mark.parametrize("processors", [1, 2, 64])
def test_ranks_that_this_machine_does_not_carry_are_refused(processors: int) -> None:
    carried, plenty = 64 * processors, 1 << 50
    assert why_too_many(carried, 1 << 20, processors, plenty) is None
    assert why_too_many(carried, 1 << 20, processors, None) is None
    for ranks in (carried + 1, 9801, 2 * 99999):
        for memory in (plenty, None):
            why = why_too_many(ranks, 1 << 20, processors, memory)
            assert why is not None
            assert (
                f"{ranks} ranks are too many for this machine, which carries {carried}: {carried} on " in why
            )
    each = 512 << 20  # of a rank with four arrays of 64 MiB
    assert why_too_many(16, 256 << 20, processors, 16 * each) is None
    why = why_too_many(16, 256 << 20, processors, 16 * each - 1)
    assert why is not None
    assert "carries 15: " in why
    assert "and 15 in 8 GiB of free memory (512 MiB for each)" in why
    assert "carries 0: " in (why_too_many(2, 4, processors, 0) or "")


@pytest.mark.parametrize(
    ("words", "each"),
    [
        ("allreduce --peers none --sizes 64MiB", "384 MiB"),
        ("allreduce --peers gloo,mpi --sizes 1KiB,64MiB --modes 1x2p,1x2r --comm-dtype float16", "704 MiB"),
        ("collectives --peers gloo,mpi --sizes 64MiB", "704 MiB"),
        ("gradients", "1.25 GiB"),
    ],
)
def test_arrays_count_by_contender(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, each: str
) -> None:
    monkeypatch.setattr(machine, "memory_available", lambda: 1 << 20)
    assert main(["bench", *words.split(), "--emulate", "2x1"]) == 2
    assert f"({each} for each)" in capsys.readouterr().err


@pytest.mark.parametrize("benchmark", ["allreduce", "gradients"])
def test_they_are_refused_before_anything_starts(tmp_path: Path, benchmark: str) -> None:
    layout = f"2x{32 * machine.core_allowance() + 1}"
    # Without the programs that make hosts: none could be made.
    words = [sys.executable, "-m", "multiring", "bench", benchmark, "--emulate", layout]
    done = Job(words, env={"PATH": str(tmp_path)}).run(code=2)
    assert f"--emulate {layout}: " in done.stderr
    assert " ranks are too many for this machine, which carries " in done.stderr


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
