"""`multiring tune` and the file that it writes, on ranks that take themselves to be on several hosts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multiring
from multiring import UsageError, cli
from multiring.tuning.measure import Measured, candidates, classes_of
from multiring.tuning.table import AUTO, ROUNDS, Algorithm, SizeClass, Tuning, load, ranks_of_hosts
from tests.nursery import Nursery
from tests.support import REPOSITORY, run_job

CLASSES = (
    SizeClass(64, Algorithm("2tx2d")),
    SizeClass(4096, Algorithm(ROUNDS)),
    SizeClass(100_000, Algorithm(AUTO, 4096)),
    SizeClass(200_000, Algorithm("2px2t")),
)
TUNING = Tuning((2, 2), CLASSES)

TUNE = """
import os, sys
from multiring import cli
from tests.support import pretend_places
pretend_places([rank % int(os.environ["HOSTS"]) for rank in range(int(os.environ["MULTIRING_SIZE"]))])
sys.exit(cli.main(["tune", *sys.argv[1:]]))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps(TUNING.as_json()))
    return path


def test_a_file_is_read_as_it_was_written(file: Path) -> None:
    assert load(str(file)) == TUNING
    assert TUNING.text == "2x2:64=2tx2d,4096=rounds,100000=auto/4096,200000=2px2t"
    assert Tuning((2, 1), CLASSES[1:2]).text == "2+1:4096=rounds"
    assert ranks_of_hosts([0, 1, 2, 0]) == (2, 1, 1)


def without(name: str) -> dict[str, Any]:
    found = TUNING.as_json()
    del found[name]
    return found


def with_class(**fields: Any) -> dict[str, Any]:
    found = TUNING.as_json()
    found["classes"][1].update(fields)
    return found


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ([], "format is not 'multiring tuning 1'"),
        (without("ranks_of_hosts"), "ranks_of_hosts is not a list of one or more"),
        ({**TUNING.as_json(), "ranks_of_hosts": [2, 0]}, r"ranks_of_hosts\[1\] is 0, not an integer of 1"),
        (without("classes"), "classes is not a list"),
        ({**TUNING.as_json(), "classes": [1]}, r"classes\[0\] is not an object"),
        (with_class(up_to_bytes="1K"), r"classes\[1\].up_to_bytes is '1K', not an integer of 1 or more"),
        (with_class(up_to_bytes=64), r"classes\[1\].up_to_bytes is not larger"),
        (with_class(segment_bytes=64), r"classes\[1\].segment_bytes has to be 0: rounds"),
        (with_class(mode=None), r"classes\[1\].mode is not 'rounds', 'auto' or a mode"),
        (with_class(mode="2x3"), r"classes\[1\].mode does not fit: mode 2x3 is for 6 ranks"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(file: Path, content: Any, told: str) -> None:
    file.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=rf"tuning\.json: {told}"):
        load(str(file))


def test_files_that_cannot_be_read(file: Path) -> None:
    file.write_text("{")
    with pytest.raises(UsageError, match=r"tuning\.json is no JSON"):
        load(str(file))
    with pytest.raises(UsageError, match="MULTIRING_TUNING names .*missing, which cannot be read: No such"):
        load(str(file.with_name("missing")))


def sums(comm: multiring.Communicator) -> list[bytes]:
    generator = np.random.default_rng(comm.rank)
    arrays = [generator.standard_normal(count).astype(np.float32) for count in (3, 999, 20_000, 90_000)]
    works = [comm.allreduce_async(each, name=f"a{index}") for index, each in enumerate(arrays)]
    results = [comm.allreduce(each).tobytes() for each in arrays]
    assert [np.asarray(work.wait()).tobytes() for work in works] == results
    queue = comm.named_queue("q")
    assert [queue.allreduce(each, name=str(each.size)).tobytes() for each in arrays] == results
    assert comm.allreduce(arrays[0], comm_dtype="bfloat16").size == 3
    return results


def follow(rank: int, path: str, other: str) -> tuple[str, list[bytes]]:
    os.environ["MULTIRING_TUNING"] = path if rank % 2 == 0 else other
    comm = multiring.init()
    group = comm.split(comm.rank // 3)
    assert group.allreduce(np.ones(100_000))[0] == group.size
    return comm._core.tuning, sums(comm)


def test_jobs_follow_a_file_with_the_same_bits(nursery: Nursery, file: Path) -> None:
    expected = nursery.run(4, sums, hosts=2)[0].value
    assert expected is not None
    for outcome in nursery.run(4, follow, str(file), str(file), init=False, hosts=2):
        assert outcome.value == (TUNING.text, expected), outcome.trace
    assert "MULTIRING_TUNING" not in nursery.output()


def test_other_clusters_do_without_and_rank_0_warns(nursery: Nursery, file: Path) -> None:
    for outcome in nursery.run(4, follow, str(file), str(file), init=False, hosts=3):
        assert outcome.value is not None, outcome.trace
    told = "MULTIRING_TUNING is for 2x2 (hosts x ranks on each), and this job has 2+1+1: it is not followed"
    assert nursery.output().count(told) == 1, nursery.output()


def test_files_that_differ_between_ranks(nursery: Nursery, file: Path) -> None:
    other = file.with_name("other.json")
    other.write_text(json.dumps(Tuning((2, 2), CLASSES[:2]).as_json()))
    outcomes = nursery.run(4, follow, str(file), str(other), init=False, hosts=2)
    assert all(isinstance(outcome.error, UsageError) for outcome in outcomes), outcomes
    assert f"rank 1 has MULTIRING_TUNING (what the file says)='{Tuning((2, 2), CLASSES[:2]).text}'" in str(
        outcomes[0].error
    )


def test_tune_writes_what_jobs_follow(tmp_path: Path, nursery: Nursery) -> None:
    path = tmp_path / "new" / "tuned.json"
    arguments = ["--sizes", "1K,16K,256K", "--seconds", "1000", "--output", path]
    # What is to be replaced does not count, and may be missing.
    result = run_job(4, TUNE, *arguments, env={"HOSTS": "2", "MULTIRING_TUNING": str(path)}, code=0)
    tuning = load(str(path))
    assert tuning.ranks == (2, 2)
    measured = json.loads(path.read_text())["measured"]
    first = {row["algorithm"]: row for row in measured if row["nbytes"] == 1024}
    assert set(first) == {"rounds", "auto", "2px2d", "2tx2d", "2tx2t"}
    assert all(row["seconds"] > 0 for row in measured)
    assert all((row["predicted_seconds"] is None) == (row["algorithm"] == "rounds") for row in measured)
    assert {row["nbytes"] for row in measured} == {1024, 16384, 262144}
    assert result.stdout.count("chosen") == 3, result.stdout
    for told in ("predicted", "measured", "256 KiB", f"export MULTIRING_TUNING={path}"):
        assert told in result.stdout
    assert "1 KiB: " in result.stderr
    for outcome in nursery.run(4, follow, str(path), str(path), init=False, hosts=2):
        assert outcome.value is not None, outcome.trace


def test_the_largest_sizes_are_left_out_where_time_is_short(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    arguments = ["--seconds", "1e-9", "--output", path.name]
    result = run_job(
        3, TUNE, *arguments, env={"HOSTS": "2", "PYTHONPATH": str(REPOSITORY)}, cwd=tmp_path, code=0
    )
    assert f"export MULTIRING_TUNING={path}\n" in result.stdout, "for jobs that are started elsewhere, too"
    assert "4 KiB and more: left out, as that takes over --seconds 1e-09" in result.stderr
    found = json.loads(path.read_text())
    assert found["ranks_of_hosts"] == [2, 1]
    assert {row["algorithm"] for row in found["measured"]} == {"rounds", "auto"}


@pytest.mark.parametrize(
    ("hosts", "env", "arguments", "told"),
    [
        ("1", {}, [], "all 2 ranks are on one host"),
        ("2", {"MULTIRING_MODE": "1x2"}, [], "MULTIRING_MODE=1x2 leaves nothing to choose"),
        ("2", {}, ["--output", "/proc/x/y"], "/proc/x/y cannot be written on the host of rank 0"),
    ],
)
def test_what_tune_refuses(hosts: str, env: dict[str, str], arguments: list[str], told: str) -> None:
    result = run_job(2, TUNE, *arguments, env={"HOSTS": hosts, **env}, code=2)
    assert told in result.stderr


def test_tune_is_a_job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("MULTIRING_RANK", raising=False)
    assert cli.main(["tune"]) == 2
    assert "multiring run -H node0:4,node1:4 -m multiring tune" in capsys.readouterr().err


def test_ways_that_fit() -> None:
    assert [str(algorithm) for algorithm in candidates((2, 2))] == [
        "rounds",
        "auto",
        "2px2d",
        "2tx2d",
        "2tx2t",
    ]
    assert [str(algorithm) for algorithm in candidates((1,) * 12)] == [
        "rounds",
        "auto",
        "1px12d",
        "1px12t",
        "1px4px3p",
    ]
    assert [str(algorithm) for algorithm in candidates((2, 1))] == ["rounds", "auto"]


def test_the_usual_way_stays_where_it_is_about_as_quick() -> None:
    doubling = Algorithm("2tx2d")
    rows = [(1024, 80, 100, 60), (4096, 80, 100, 60), (16384, 98, 100, 97), (65536, 300, 100, 300)]
    measured = [
        Measured(size, algorithm, float(seconds))
        for size, *times in rows
        for algorithm, seconds in zip((Algorithm(ROUNDS), Algorithm(AUTO), doubling), times, strict=True)
    ]
    assert classes_of(measured, 4) == (
        SizeClass(8192, doubling),
        SizeClass(32768, Algorithm(ROUNDS)),
        SizeClass(65536, Algorithm(AUTO)),
    )
    # Two ranks use exchanges at all sizes.
    assert classes_of(
        [Measured(65536, Algorithm(ROUNDS), 1.0), Measured(65536, Algorithm(AUTO), 0.99)], 2
    ) == (SizeClass(65536, Algorithm(ROUNDS)),)
