"""What `multiring tune`, or a job at its start, measures of allreduces over several hosts, and the file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multiring
from multiring import Communicator, UsageError
from multiring.tuning import startup
from multiring.tuning.measure import Measured, candidates, classes_of
from multiring.tuning.table import AUTO, OFF, ROUNDS, Algorithm, SizeClass, Tuning, load, ranks_of_hosts
from tests.nursery import Nursery
from tests.support import REPOSITORY, refused, run_job

EXCHANGE, PLAN, DOUBLING = Algorithm(ROUNDS), Algorithm(AUTO), Algorithm("2tx2d")
CLASSES = (
    SizeClass(64, DOUBLING),
    SizeClass(4096, EXCHANGE),
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
    with pytest.raises(UsageError, match="MULTIRING_TUNING names .*missing, which cannot be read: No such"):
        load(str(file.with_name("missing")))


def changed(**fields: Any) -> str:
    return json.dumps(TUNING.as_json() | fields)


def with_class(**fields: Any) -> str:
    classes = TUNING.as_json()["classes"]
    classes[1].update(fields)
    return changed(classes=classes)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", " is no JSON"),
        (" " * (1 << 20) + "{}", " is longer than what `multiring tune` writes"),
        ("[]", ": format is not 'multiring tuning 1'"),
        (changed(ranks_of_hosts=None), ": ranks_of_hosts is not a list of one or more"),
        (changed(ranks_of_hosts=[2, 0]), r": ranks_of_hosts\[1\] is 0, not an integer of 1"),
        (changed(classes=None), ": classes is not a list"),
        (changed(classes=[1]), r": classes\[0\] is not an object"),
        (with_class(up_to_bytes="1K"), r": classes\[1\].up_to_bytes is '1K', not an integer of 1 or more"),
        (with_class(up_to_bytes=64), r": classes\[1\].up_to_bytes is not larger"),
        (with_class(segment_bytes=64), r": classes\[1\].segment_bytes has to be 0: rounds"),
        (with_class(mode=None), r": classes\[1\].mode is not 'rounds', 'auto' or a mode"),
        (with_class(mode="2x3"), r": classes\[1\].mode does not fit: mode 2x3 is for 6 ranks"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(file: Path, content: str, told: str) -> None:
    file.write_text(content)
    with pytest.raises(UsageError, match=rf"tuning\.json{told}"):
        load(str(file))


def sums(comm: Communicator) -> list[bytes]:
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
    expected = nursery.values(4, sums, hosts=2)[0]
    found = nursery.values(4, follow, str(file), str(file), init=False, hosts=2)
    assert found == [(TUNING.text, expected)] * 4
    assert "MULTIRING_TUNING" not in nursery.output()


def test_other_clusters_do_without_and_rank_0_warns(nursery: Nursery, file: Path) -> None:
    nursery.values(4, follow, str(file), str(file), init=False, hosts=3)
    told = "MULTIRING_TUNING is for 2x2 (hosts x ranks on each), and this job has 2+1+1: it is not followed"
    assert nursery.output().count(told) == 1, nursery.output()


def test_ranks_that_follow_different_things(nursery: Nursery, file: Path) -> None:
    """Other files; or one measures, and another one does not."""
    other, shorter = file.with_name("other.json"), Tuning((2, 2), CLASSES[:2])
    other.write_text(json.dumps(shorter.as_json()))
    for tunings, told in (((str(file), str(other)), f"='{shorter.text}'"), (("", OFF), "=")):
        outcomes = nursery.run(4, follow, *tunings, init=False, hosts=2)
        assert all(isinstance(outcome.error, UsageError) for outcome in outcomes), outcomes
        assert f"rank 1 has MULTIRING_TUNING (what the file says){told}" in str(outcomes[0].error)


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
    assert f"export MULTIRING_TUNING={path}" in result.stdout
    assert "1 KiB: " in result.stderr
    nursery.values(4, follow, str(path), str(path), init=False, hosts=2)


def test_the_largest_sizes_are_left_out_where_time_is_short(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    arguments = ["--seconds", "1e-9", "--output", path.name]
    env = {"HOSTS": "2", "PYTHONPATH": str(REPOSITORY)}
    result = run_job(3, TUNE, *arguments, env=env, cwd=tmp_path, code=0)
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
    assert told in run_job(2, TUNE, *arguments, env={"HOSTS": hosts, **env}, code=2).stderr


def test_tune_is_a_job() -> None:
    assert "multiring run -H node0:4,node1:4 -m multiring tune" in refused("tune")


def test_ways_that_fit() -> None:
    fitting = {(2, 2): "2px2d 2tx2d 2tx2t", (1,) * 12: "1px12d 1px12t 1px4px3p", (2, 1): ""}
    for ranks, modes in fitting.items():
        assert list(map(str, candidates(ranks))) == ["rounds", "auto", *modes.split()]


def test_the_usual_way_stays_where_it_is_about_as_quick() -> None:
    rows = [(1024, 80, 100, 60), (4096, 80, 100, 60), (16384, 98, 100, 97), (65536, 300, 100, 300)]
    measured = [
        Measured(size, algorithm, float(seconds))
        for size, *times in rows
        for algorithm, seconds in zip((EXCHANGE, PLAN, DOUBLING), times, strict=True)
    ]
    expected = (SizeClass(8192, DOUBLING), SizeClass(32768, EXCHANGE), SizeClass(65536, PLAN))
    assert classes_of(measured, 4) == expected
    # Two ranks use exchanges at all sizes.
    measured = [Measured(65536, EXCHANGE, 1.0), Measured(65536, PLAN, 0.99)]
    assert classes_of(measured, 2) == (SizeClass(65536, EXCHANGE),)


KIB = 1024
TREE = Algorithm("2tx2t")
SIZES = (1 * KIB, 8 * KIB, 32 * KIB, 128 * KIB)


def straight(sizes: tuple[int, ...] = SIZES, **lines: tuple[float, float]) -> list[Measured]:
    """Measurements on lines: microseconds and microseconds per KiB by the algorithms' names."""
    algorithms = {"rounds": EXCHANGE, "auto": PLAN, "tree": TREE}
    return [
        Measured(nbytes, algorithms[name], 1e-6 * (latency + slope * nbytes / KIB))
        for nbytes in sizes
        for name, (latency, slope) in lines.items()
    ]


def test_lines_tell_where_one_way_ends_and_the_next_begins() -> None:
    # The plan is 20 % quicker than rounds from 35 KiB on: as usual.
    found = startup.classes_by_model(straight(rounds=(100, 9), auto=(300, 1), tree=(500, 9)), 4)
    assert found == (), "nothing is clearly quicker"
    found = startup.classes_by_model(straight(rounds=(100, 1), auto=(300, 0.5), tree=(500, 9)), 4)
    assert found == (SizeClass(128 * KIB, EXCHANGE), SizeClass(256 * KIB, PLAN))
    found = startup.classes_by_model(straight(rounds=(100, 20), auto=(90, 2), tree=(20, 4)), 4)
    assert found == (SizeClass(16 * KIB, TREE), SizeClass(256 * KIB, PLAN))


def test_what_was_not_measured_goes_as_usual() -> None:
    found = startup.classes_by_model(straight((KIB,), rounds=(100, 1), auto=(100, 1), tree=(10, 1)), 4)
    usual = (SizeClass(16 * KIB, EXCHANGE), SizeClass(32 * KIB, PLAN))
    assert found == (SizeClass(KIB, TREE), *usual)


def test_a_way_that_was_given_up_is_none_for_larger_sizes() -> None:
    # Measured at 1 KiB alone, where it is by far the quickest.
    measured = [*straight(rounds=(1000, 50), auto=(100, 15)), Measured(KIB, TREE, 31e-6)]
    found = startup.classes_by_model(measured, 4)
    assert found == (SizeClass(KIB, TREE), SizeClass(256 * KIB, PLAN))


def test_a_line_does_not_overrule_what_was_measured_beside_it() -> None:
    measured = straight((KIB, 8 * KIB), rounds=(100, 1), auto=(500, 1), tree=(500, 1))
    # Far quicker at 1 KiB, as slow as rounds at 8 KiB: there the line between them is below both.
    measured += [Measured(KIB, Algorithm("2px2d"), 1e-6), Measured(8 * KIB, Algorithm("2px2d"), 108e-6)]
    found = startup.classes_by_model(measured, 4)
    assert found[0].algorithm == Algorithm("2px2d")
    beside = [each.algorithm for each in found if 4 * KIB <= each.up_to <= 16 * KIB]
    assert set(beside) <= {EXCHANGE}, found


def start(rank: int, tuning: str) -> tuple[str, str, list[bytes]]:
    os.environ["MULTIRING_TUNING"] = tuning
    # What would be measured here is chance.
    startup._MAX_BARRIER_SECONDS = 1e9
    startup._SECONDS = 1e9
    startup.classes_by_model = lambda measured, size: (  # type: ignore[assignment]
        SizeClass(4 * KIB, DOUBLING),
        SizeClass(8 * KIB, PLAN),
    )
    comm = multiring.init()
    arrays = [np.random.default_rng(comm.rank).standard_normal(count) for count in (3, 700, 90_000)]
    queue = comm.named_queue("q")
    results = [queue.allreduce(each, name=str(each.size)).tobytes() for each in arrays]
    assert [comm.allreduce(each).tobytes() for each in arrays] == results
    duplicate = comm.split(0)
    return comm._core.tuning, duplicate._core.tuning, results


def test_ranks_follow_it_from_the_start_with_the_same_bits(nursery: Nursery) -> None:
    measured = nursery.values(4, start, "", init=False, hosts=2)
    usual = nursery.values(4, start, OFF, init=False, hosts=2)
    for followed, without in zip(measured, usual, strict=True):
        assert followed[:2] == ("2x2:4096=2tx2d,8192=auto",) * 2
        assert without == ("", "", followed[2])


def start_really(comm: Communicator) -> str:
    assert comm.allreduce(np.ones(50_000))[0] == comm.size
    return str(comm._core.tuning)


@pytest.mark.parametrize(("size", "hosts"), [(2, 2), (3, 2)])
def test_all_ranks_find_the_same(nursery: Nursery, size: int, hosts: int) -> None:
    assert len(set(nursery.values(size, start_really, hosts=hosts))) == 1


TELLING = """
import multiring
from multiring.tuning import startup
from tests.support import pretend_places
pretend_places([0, 1, 0])
startup._MAX_BARRIER_SECONDS = 1e9
multiring.init()
"""


def test_rank_0_tells_what_it_has_found() -> None:
    result = run_job(3, TELLING, env={"MULTIRING_LOG_LEVEL": "info"}, code=0)
    assert result.stderr.count("allreduces use what was measured in ") == 1, result.stderr
    assert run_job(3, TELLING, code=0).stderr == ""
