"""`multiring bench`: options, what is told before the measuring, and a real run."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from multiring.benchmarks import command
from multiring.benchmarks.collectives import results
from multiring.benchmarks.collectives.kinds import COLLECTIVES
from multiring.errors import UsageError
from tests.support import Job, refused, run_multiring


def parse(*words: str, benchmark: str = "allreduce") -> argparse.Namespace:
    return command._parse(benchmark, command._load(benchmark), list(words))


def test_options_are_understood() -> None:
    options = parse("--sizes=4,1KiB, 64kib,1MiB,1GiB,8B,4", "--peers", "mpi,gloo,mpi", "--json=a b")
    assert options.sizes == [4, 2**10, 2**16, 2**20, 2**30, 8]
    assert options.peers == ["mpi", "gloo"]
    assert options.shown_as.startswith("multiring bench allreduce ")
    assert options.shown_as.endswith("'--json=a b'")
    options = parse("--collectives", "gather, alltoall,gather", "--peers", "none", benchmark="collectives")
    assert (options.collectives, options.peers) == (["gather", "alltoall"], [])
    assert parse(benchmark="collectives").collectives == list(COLLECTIVES)


WRONG = {
    "allreduce --sizes 6": "'6' is not a size of an array of float32: give a multiple of 4 bytes",
    "allreduce --peers nccl": "there is no peer 'nccl': known are gloo (in the package torch) and mpi",
    "allreduce --emulate 1x4": "'1x4' is no layout: give hosts x ranks on each, such as 2x4",
    "allreduce --emulate 2x2 --rate 1gbit,": "'' is no rate: give such as 1gbit",
    "allreduce --emulate 2x2 -np 3": "-np 3 and --emulate 2x2 do not go together",
    "allreduce --rate 1gbit": "--rate is of emulated hosts: give --emulate as well",
    "allreduce --tcp-streams": "--tcp-streams is of emulated hosts: give --emulate as well",
    "allreduce --emulate 3x1 --cables ring --switch-queue 64kb": "--switch-queue is of a switch",
    "allreduce --plot results.jpg": "has to end in .png: results.jpg",
    "allreduce --json .": "--json . is a directory",
    "allreduce --json /no/such/place/x.json": "/no/such/place is no directory that can be written to",
    "allreduce --peers none --mpich /no/such": "--mpich /no/such: /no/such is no Python: make one by",
    "collectives --collectives allreduce": "there is no collective 'allreduce' here: known are broadcast",
    "collectives --mpich x": "there is no option --mpich",
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_told_before_the_measuring(words: str) -> None:
    assert WRONG[words] in refused("bench", *words.split())


def test_missing_packages_are_told_before_the_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise ModuleNotFoundError("no", name="rich.table")

    options, without = parse("--plot", "x.png"), parse("--format", "markdown")
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"need rich and matplotlib: run pip install 'multiring\[bench\]'"):
        command._check_outputs(options)
    command._check_outputs(without)
    monkeypatch.setattr(command.importlib, "import_module", fail)
    with pytest.raises(UsageError, match=r"needs rich.table, .* pip install 'multiring\[bench\]'"):
        command._load("gradients")


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def fail(beside: Path) -> None:
        beside.write_text("half")
        raise OSError("disk full")

    command.write_whole(path, lambda beside: beside.write_text("first"))
    with pytest.raises(OSError, match="disk full"):
        command.write_whole(path, fail)
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def bench(*words: str, benchmark: str = "allreduce") -> Callable[[Path], list[str]]:
    return lambda root: [
        *(sys.executable, "-m", "multiring", "bench", benchmark),
        *(word.replace("DIR", str(root / "d")) for word in words),
    ]


def measured(
    *words: str, benchmark: str = "allreduce"
) -> tuple[subprocess.CompletedProcess[str], dict[str, bytes]]:
    """Runs it to a good end that leaves nothing: what it prints, and its files, r.json among them."""
    with Job(bench(*words, "--json", "DIR/r.json", benchmark=benchmark)) as job:
        done = job.ended(0, timeout=600)
        return done, {path.name: path.read_bytes() for path in job.directory.iterdir()}


def test_small_allreduces_by_name() -> None:
    done, files = measured(
        "-np", "2", "--turns", "2", "--sizes", "4", "--plot", "DIR/r.png", benchmark="named"
    )
    rows = json.loads(files["r.json"])["rows"]
    names = ["hvd.allreduce", "hvd.allreduce_", "named queue", "communicator"]
    assert [(row["bytes"], row["name"]) for row in rows] == [(4, name) for name in names]
    assert all(row["sample"]["median"] > 0 and row["name"] in done.stdout for row in rows)


@pytest.mark.full
def test_programs_of_jax_that_shard() -> None:
    words = ["-np", "2", "--turns", "2", "--sizes", "4,64KiB", "--plot", "DIR/r.png"]
    done, files = measured(*words, benchmark="sharding")
    rows = json.loads(files["r.json"])["rows"]
    names = [name for name in ("psum", "all_gather", "psum_scatter") for _ in range(2)]
    assert [row["operation"] for row in rows] == [*names, "train"]
    assert all(row[way]["median"] > 0 for row in rows for way in ("gloo", "multiring", "alone"))
    assert "Gloo / multiring" in done.stdout


def test_a_run_measures_prints_and_writes_and_leaves_nothing() -> None:
    words = ["-np", "2", "--sizes", "4,64KiB", "--peers", "gloo", "--seconds", "0.02", "--plot", "DIR/r.png"]
    done, files = measured(*words)
    report = json.loads(files["r.json"])
    assert sorted(files) == ["r.json", "r.png"]
    assert (report["ranks"], report["launcher"]) == (2, "multiring")
    names = ["multiring symmetric", "multiring", "limit", "Gloo"]
    cells = [(row["bytes"], row["contender"]) for row in report["rows"]]
    assert cells == [(size, name) for size in (4, 64 * 1024) for name in names]
    for row in report["rows"]:
        assert 0 < row["sample"]["low"] <= row["sample"]["median"] <= row["sample"]["high"]
        assert row["sample"]["iterations"] >= 6
        assert row["contender"] in done.stdout
    assert "x Gloo" in done.stdout
    assert results.LIMIT in next(line for line in done.stderr.splitlines() if line.startswith("64 KiB: "))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-np", "3"], "-np 3 was given inside a job of 2 ranks; leave it out"),
        (["--emulate", "2x1"], "--emulate starts its own ranks: leave multiring out"),
    ],
)
def test_ranks_are_not_started_inside_ranks(words: list[str], told: str) -> None:
    launcher = ["run", "-np", "2", "-m", "multiring", "bench", "allreduce"]
    assert told in run_multiring(*launcher, *words, "--peers", "none", code=2).stderr
