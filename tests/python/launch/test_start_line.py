"""What rank 0 says at the start of a job, and what it warns of."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import multiring
from multiring import machine
from multiring.console import start_line
from tests.support import run_job, run_python

# Ranks that join, split, and join again.
SCRIPT = """
import multiring
comm = multiring.init()
comm.split(comm.rank % 2).barrier()
comm.named_queue().close()
multiring.shutdown()
multiring.init()
"""
LINE = r"multiring: version {}; {} ranks on {}, {} for each rank; {}; order canonical\n"
SHARE = (
    r"multiring: warning: {} ranks share \d+ cores? of host \S+ and take turns on them, .*: start at most "
)


def line(ranks: int, hosts: str, cores: str, between: str) -> str:
    return LINE.format(re.escape(multiring.__version__), ranks, hosts, cores, between)


def test_rank_0_says_once_what_job_this_is() -> None:
    """And that ranks outnumber cores: on two of this host, however many it has."""
    allowed = os.sched_getaffinity(0)
    some = sorted(allowed)[:2]
    ranks = 2 * len(some)
    cores = min(len(some), max(1.0, machine.cpu_quota() or len(some))) / ranks
    try:
        os.sched_setaffinity(0, some)
        told = run_job(ranks, SCRIPT, launcher_args=["--no-tag-output"], code=0).stderr
    finally:
        os.sched_setaffinity(0, allowed)
    assert re.fullmatch(
        line(ranks, "1 host", f"{cores:.3g} cores", "shared memory") + SHARE.format(ranks) + ".*\n", told
    )
    assert run_job(2, SCRIPT, env={"MULTIRING_QUIET": "1"}, code=0).stderr == ""


def test_the_start_is_told_before_the_ranks_write(tmp_path: Path) -> None:
    """Where all of it goes into one pipe."""
    script = tmp_path / "script.py"
    script.write_text("import multiring\nprint('first of', multiring.init().rank)\n")
    command = [sys.executable, "-m", "multiring", "run", "-np", "4", str(script)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    told, own = done.stdout.splitlines(), [f"[{rank}] first of {rank}" for rank in range(4)]
    assert told[0].startswith("[0] multiring: version")
    assert sorted(told[-4:]) == own, done.stdout


def test_ranks_of_several_hosts_say_what_is_between_them() -> None:
    pretend = "from tests.support import pretend_places\npretend_places([0, 1])\n"
    told = run_job(2, pretend + SCRIPT, env={"MULTIRING_TUNING": "off"}, code=0).stderr
    algorithms = r"TCP between hosts; allreduces by \w+ up to .*64 MiB"
    assert re.fullmatch(r"\[0\] " + line(2, "2 hosts", r"[\d.]+ cores?", algorithms), told)


def test_the_sizes_that_rules_end_at_are_told(tmp_path: Path) -> None:
    rules = tmp_path / "rules.txt"
    rules.write_text("0-100K rounds\n50K-1M 1x2d\n0- 1x2t\n")
    pretend = "from tests.support import pretend_places\npretend_places([0, 1])\n"
    told = run_job(2, pretend + SCRIPT, env={"MULTIRING_TUNING": str(rules)}, code=0).stderr
    assert "; allreduces by rounds up to 100 KiB, 1px2d up to 1 MiB, 1px2t up to 64 MiB; order" in told


def test_a_rank_alone_says_so_and_warns_where_others_were_meant() -> None:
    script = "import multiring\nmultiring.init()\n"
    alone = (
        "version .*; 1 rank \\(no launcher; `multiring run -np 2 train.py` starts two\\), .* for each rank\n"
    )
    assert re.fullmatch(f"multiring: {alone}", run_python(script).stderr)
    told = run_python(script, {"WORLD_SIZE": "4"}).stderr
    assert re.fullmatch(
        f"multiring: {alone}multiring: warning: .* alone, although WORLD_SIZE is 4: .*\n", told
    )
    for variables in ({"SLURM_NTASKS": "8"}, {}):  # the launcher sets MASTER_ADDR
        told = run_job(1, script, env=variables, code=0).stderr
        assert re.fullmatch("multiring: version .*; 1 rank, .* for each rank\n", told)
    one_of_torchrun = {"TORCHELASTIC_RUN_ID": "a", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "here"}
    assert "alone" not in run_python(script, one_of_torchrun).stderr
    level = {"MULTIRING_LOG_LEVEL": "error", "WORLD_SIZE": "4"}
    assert run_python(script, level).stderr == ""


@pytest.mark.parametrize(
    ("own", "launcher", "quota", "ranks", "cores"),
    [
        ({0, 1, 2, 3}, {0, 1, 2, 3}, None, 2, 2.0),  # not bound: all see the same
        ({0, 1}, {0, 1, 2, 3}, None, 2, 2.0),  # bound to equal shares
        ({0, 1}, {0, 1, 2, 3}, None, 8, 0.5),  # bound to a NUMA node that others have as well
        ({0, 1}, set(), None, 1, 2.0),  # no launcher
        ({0, 1}, set(), None, 4, 2.0),  # bound by a launcher of another user
        ({0, 1}, set(), 3.0, 4, 0.75),  # in a container that has less
        ({0, 1, 2, 3}, set(), None, 8, 0.5),  # not bound, and the launcher is another user's
        ({0, 1, 2, 3}, {0, 1, 2, 3}, 1.5, 3, 0.5),  # a container that has less
    ],
)
def test_cores_for_each_rank(
    monkeypatch: pytest.MonkeyPatch,
    own: set[int],
    launcher: set[int],
    quota: float | None,
    ranks: int,
    cores: float,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: own)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(start_line, "_launcher_cpus", lambda: launcher)
    monkeypatch.setattr(machine, "cpu_quota", lambda: quota)
    assert start_line.cores_for_each_rank(ranks) == cores


def test_what_looks_distributed(tmp_path: Path) -> None:
    assert start_line.looks_distributed({"SLURM_NTASKS": "8"}) == "SLURM_NTASKS is 8"
    assert start_line.looks_distributed({"MASTER_ADDR": "node0"}) == "MASTER_ADDR is set"
    for name in ("PMIX_RANK", "JAX_COORDINATOR_ADDRESS", "JOB_COMPLETION_INDEX"):
        assert start_line.looks_distributed({name: "0"}) == f"{name} is set"
    places = tmp_path / "nodes"
    for text, found in (("a\n", ""), ("a\nb\n", "PBS_NODEFILE names 2 places")):
        places.write_text(text)
        assert start_line.looks_distributed({"PBS_NODEFILE": str(places)}) == found
    assert start_line.looks_distributed({"PBS_NODEFILE": "/nowhere"}) == ""
    assert start_line.looks_distributed({"WORLD_SIZE": "1", "PMI_SIZE": "x"}) == ""


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["/a/bin/multiring", "train", "--epochs", "2"], "multiring train -np 2"),
        (["/a/multiring/__main__.py", "train"], "multiring train -np 2"),
        (["/a/fit.py", "train"], "multiring run -np 2 fit.py"),
        (["/a/bin/multiring", "tune"], "multiring run -np 2 train.py"),
    ],
)
def test_the_command_that_starts_two_ranks(
    words: list[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", words)
    assert start_line._two_ranks() == command
