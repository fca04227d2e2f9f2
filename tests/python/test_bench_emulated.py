"""`multiring bench allreduce --emulate`: on hosts that are network namespaces."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from multiring.models.bench.emulated_hosts import why_not
from multiring.models.bench.results import Report
from tests.python.test_bench import bench
from tests.support import Job, wait_until

HOLDER = "sleep infinity"  # of the namespaces of an emulated host


def command_lines() -> list[str]:
    """Of all processes."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace"))
    return lines


@pytest.mark.parametrize("peers", ["gloo", "mpi"])
def test_emulated_hosts_are_measured_and_leave_nothing(peers: str) -> None:
    if reason := why_not():
        pytest.skip(reason)
    words = ["--emulate", "2x2", "--rate", "400mbit,400mbit", "--sizes", "64KiB", "--seconds", "0.02"]
    holders = command_lines().count(HOLDER)
    words += ["--wire", "bfloat16"]
    with Job(bench(*words, "--peers", peers, "--json", "DIR/r.json", "--format", "markdown")) as job:
        done = job.finish()
        job.assert_nothing_left()
        assert done.returncode == 0, done.stderr
        report = Report.from_json((job.directory / "r.json").read_text())
    assert (report.ranks, report.hosts) == (4, "2x2 --rate 400mbit,400mbit")
    peer = "Gloo" if peers == "gloo" else "Open MPI"
    assert report.contenders == ["multiring", "multiring bfloat16", peer, "limit"]
    limit = report.row("limit", 64 * 1024)
    assert limit is not None
    assert limit.sample.median == 64 * 1024 / 100e6  # the array once, over both links
    assert "4 ranks of emulated hosts (2x2 --rate 400mbit,400mbit), all on" in done.stdout
    assert command_lines().count(HOLDER) == holders


def test_emulated_hosts_are_not_started_inside_ranks() -> None:
    launcher = [sys.executable, "-m", "multiring", "run", "-np", "2", "-m", "multiring"]
    with Job(lambda root: [*launcher, *bench("--emulate", "2x1", "--peers", "none")(root)[3:]]) as job:
        done = job.finish()
        job.assert_nothing_left()
    assert done.returncode == 2
    assert "--emulate starts its own ranks: leave multiring out" in done.stderr


def test_emulated_hosts_end_with_a_bench_that_is_killed() -> None:
    if reason := why_not():
        pytest.skip(reason)
    holders = command_lines().count(HOLDER)
    words = ["--emulate", "2x1", "--sizes", "64KiB", "--seconds", "60", "--peers", "none"]
    with Job(bench(*words)) as job:
        wait_until(lambda: command_lines().count(HOLDER) > holders, "hosts")
        job.process.kill()
        job.finish()
        wait_until(lambda: command_lines().count(HOLDER) == holders, "the end of the hosts")
