"""What `multiring tune`, or a job at its start, measures of allreduces over several hosts, and the file."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import multiring
from multiring import Communicator, UsageError
from multiring.tuning import costs
from multiring.tuning import measure as measuring
from multiring.tuning.file import OFF, has_costs, load, rule_limits
from multiring.tuning.measure import Measured, algorithms_of, measure
from tests.nursery import Nursery
from tests.support import REPOSITORY, refused, run_job

RULES = "0-64 2tx2d\n0-4K rounds\n0-100000 2px2p/4096\n200K- 2px2t"
# Which no measurement finds: trees, as what all ranks share is busy with messages.
COSTS = "costs shared_message_seconds=0.001"

TUNE = """
import os, sys
from multiring import cli
from tests.support import pretend_places
pretend_places([rank % int(os.environ["HOSTS"]) for rank in range(int(os.environ["MULTIRING_SIZE"]))])
sys.exit(cli.main(["tune", *sys.argv[1:]]))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tuning.txt"
    path.write_text(f"# measured on a Monday\n{RULES}\n\n{COSTS}  # beside a backup\n")
    return path


def test_the_limits_of_rules_of_allreduces() -> None:
    rules = "\n0-100K rounds\nallgather 0-7 rounds\nallreduce 50K-1M 1x4d\n0- 1x4t\ncosts latency=1"
    assert sorted(rule_limits(rules)) == [50 * 1024 - 1, 100 * 1024, 1 << 20]


def test_a_file_is_read_without_its_comments(file: Path) -> None:
    assert load(str(file)) == f"\n{RULES}\n\n{COSTS}", "lines keep their numbers"
    assert has_costs(load(str(file)))
    assert not has_costs(RULES)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            b"0- rounds\n0-16k rounds\n",
            "line 2 of the tuning, '0-16k rounds': '16k' is not a number of bytes",
        ),
        (b"# {\n{}\n", "line 2 of the tuning, '{}': neither costs nor a rule, such as 0-16K rounds"),
        (b"costs speed=1\n", "line 1 of the tuning, 'costs speed=1': there is no cost 'speed'"),
        (b" " * (1 << 20) + b"0- rounds", "is longer than any tuning"),
        (b"\xff\xfe", "cannot be read: it is no text"),
    ],
)
def test_the_line_that_is_wrong_is_named(file: Path, content: bytes, told: str) -> None:
    file.write_bytes(content)
    with pytest.raises(UsageError, match=rf"{re.escape(str(file))}.*{re.escape(told)}"):
        load(str(file))


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(
        UsageError, match="MULTIRING_TUNING names .*missing, which cannot be read: No such"
    ) as raised:
        load("/missing")
    assert raised.value.__suppress_context__, "one traceback is shown"


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


def follow(rank: int, *paths: str) -> tuple[str, list[bytes]]:
    os.environ["MULTIRING_TUNING"] = paths[rank % len(paths)]
    comm = multiring.init()
    group = comm.split(comm.rank // 3)
    assert group.allreduce(np.ones(100_000))[0] == group.size
    return comm._core.tuning, sums(comm)


def test_jobs_follow_a_file_with_the_same_bits(nursery: Nursery, file: Path) -> None:
    expected = nursery.values(4, sums, hosts=2)[0]
    found = nursery.values(4, follow, str(file), init=False, hosts=2)
    assert found == [(load(str(file)), expected)] * 4
    assert "MULTIRING_TUNING" not in nursery.output()


def test_other_clusters_do_without_rules_and_rank_0_warns(nursery: Nursery, file: Path) -> None:
    found = nursery.values(4, follow, str(file), init=False, hosts=3)
    assert all(has_costs(tuning) and "rounds" not in tuning for tuning, _ in found)
    told = "line 2 of the tuning: mode 2tx2d does not fit the ranks, 4 (3 hosts with up to 2 ranks each)"
    assert nursery.output().count(told) == 1, nursery.output()


def test_ranks_that_follow_different_things(nursery: Nursery, file: Path) -> None:
    """Other files; or one measures, and another one does not."""
    other = file.with_name("other.txt")
    other.write_text("0- rounds")
    for tunings, told in (((str(file), str(other)), "='0- rounds'"), (("", OFF), "=")):
        outcomes = nursery.run(4, follow, *tunings, init=False, hosts=2)
        assert all(isinstance(outcome.error, UsageError) for outcome in outcomes), outcomes
        assert f"rank 1 has MULTIRING_TUNING (what the file says){told}" in str(outcomes[0].error)


def test_tune_writes_what_jobs_follow(tmp_path: Path, nursery: Nursery) -> None:
    path = tmp_path / "new" / "tuned.txt"
    arguments = ["--sizes", "1K,16K,256K", "--seconds", "1000", "--output", path]
    # What is to be replaced does not count, and may be missing.
    result = run_job(4, TUNE, *arguments, env={"HOSTS": "2", "MULTIRING_TUNING": str(path)}, code=0)
    written = path.read_text()
    assert written.startswith(f"# multiring {multiring.__version__}, 2x2 (hosts x ranks)\n")
    assert has_costs(load(str(path)))
    algorithms = set(re.findall(r"  1 KiB  (\w+)", result.stdout))
    assert {"rounds", "2px2p", "2px2d", "2tx2d", "2tx2t"} <= algorithms, result.stdout
    assert len(re.findall("  chosen(?:, quickest)?\n", result.stdout)) == 3, result.stdout
    assert len(re.findall("quickest\n", result.stdout)) >= 3, result.stdout
    assert "at worst the chosen one takes " in written, "for who looks at the file"
    assert f"export MULTIRING_TUNING={path}" in result.stdout
    assert "1 KiB: " in result.stderr
    nursery.values(4, follow, str(path), init=False, hosts=2)


def test_the_largest_sizes_are_left_out_where_time_is_short(tmp_path: Path) -> None:
    path = tmp_path / "tuned.txt"
    arguments = ["--seconds", "1e-9", "--output", path.name]
    env = {"HOSTS": "2", "PYTHONPATH": str(REPOSITORY)}
    result = run_job(3, TUNE, *arguments, env=env, cwd=tmp_path, code=0)
    assert f"export MULTIRING_TUNING={path}\n" in result.stdout, "for jobs that are started elsewhere, too"
    assert "4 KiB and more: left out, as that takes over --seconds 1e-09" in result.stderr
    assert ", 2+1 (hosts x ranks)\n" in path.read_text()


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


def start(rank: int, tuning: str) -> tuple[str, str, list[bytes]]:
    os.environ["MULTIRING_TUNING"] = tuning
    # It may be called crowded here.
    costs._MAX_BARRIER_SECONDS = 1e9
    comm = multiring.init()
    group = comm.split(0)
    other = comm.split(comm.rank // 3)
    assert has_costs(other._core.tuning) == has_costs(comm._core.tuning)
    return comm._core.tuning, group._core.tuning, sums(comm)


def test_a_job_measures_at_its_start_with_the_same_bits(nursery: Nursery, file: Path) -> None:
    without = nursery.values(4, start, OFF, init=False, hosts=2)
    assert without == [("", "", without[0][2])] * 4
    measured = nursery.values(4, start, "", init=False, hosts=2)
    assert measured == [measured[0]] * 4
    assert measured[0] == (measured[0][0], measured[0][0], without[0][2])
    assert has_costs(measured[0][0])
    file.write_text(RULES)
    ruled = nursery.values(4, start, str(file), init=False, hosts=2)
    assert ruled == [ruled[0]] * 4
    assert ruled[0][0].startswith(RULES + "\ncosts ")
    assert ruled[0][2] == without[0][2]


def tuning_of(comm: Communicator) -> str:
    assert comm.allreduce(np.ones(50_000))[0] == comm.size
    return comm._core.tuning


@pytest.mark.parametrize(("size", "hosts"), [(2, 2), (3, 3)])
def test_all_ranks_find_the_same(nursery: Nursery, size: int, hosts: int) -> None:
    assert len(set(nursery.values(size, tuning_of, hosts=hosts))) == 1


TELLING = """
import multiring
from multiring.tuning import costs
from multiring.tuning import measure as measuring
from tests.support import pretend_places
pretend_places([0, 1, 0])
costs._MAX_BARRIER_SECONDS = 1e9
multiring.init()
"""


def test_rank_0_tells_what_it_has_found() -> None:
    result = run_job(3, TELLING, env={"MULTIRING_LOG_LEVEL": "info"}, code=0)
    told = r"measured allreduces of 1 KiB, 16 KiB, .* in \d+ ms: costs call_seconds="
    assert len(re.findall(told, result.stderr)) == 1, result.stderr
    assert len(re.findall(r"allreduces use \w+ up to ", result.stderr)) == 1, result.stderr
    result = run_job(3, TELLING, env={"MULTIRING_LOG_LEVEL": "debug"}, code=0)
    assert (
        len(
            re.findall("an allreduce of 64 KiB is predicted to take .* by rounds, .* by 2px2p", result.stderr)
        )
        == 1
    )
    assert run_job(3, TELLING, env={"MULTIRING_QUIET": "1"}, code=0).stderr == ""


def test_one_host_tells_what_it_uses() -> None:
    """Also which mode is in force."""
    script = "\nimport multiring\nmultiring.init()\n"
    told = run_job(2, script, env={"MULTIRING_LOG_LEVEL": "info"}, code=0).stderr
    assert re.search("allreduces use .*staged or direct for arrays in symmetric memory up to 64 MiB", told), (
        told
    )
    assert len(re.findall("reduce-scatters use staged", told)) == 1, told
    assert "broadcasts use" not in told
    forced = {"MULTIRING_LOG_LEVEL": "info", "MULTIRING_MODE": "staged"}
    assert "allreduces use staged up to 64 MiB" in run_job(2, script, env=forced, code=0).stderr


def sums_by(rank: int, mode: str) -> list[bytes]:
    os.environ["MULTIRING_MODE"] = mode
    return sums(multiring.init())


def test_a_mode_may_be_rounds_or_have_a_segment(nursery: Nursery) -> None:
    modes = ("rounds", "2x2/64K", "2tx2t")
    found = [nursery.values(4, sums_by, mode, init=False, hosts=2) for mode in modes]
    assert found[0] == found[1] == found[2]


SLOW = TELLING.replace("1e9", "0")


def test_a_slow_barrier_is_taken_for_the_latency() -> None:
    result = run_job(3, SLOW, env={"MULTIRING_LOG_LEVEL": "info"}, code=0)
    assert re.search(r"measured barriers of .* alone in \d+ ms: costs latency=\d", result.stderr), (
        result.stderr
    )


STOPPED = TELLING.replace(
    "multiring.init()",
    """
measure = costs.measure
costs.measure = lambda *args, **options: [one._replace(seconds=0.0) for one in measure(*args, **options)]
comm = multiring.init()
assert comm.allreduce([1.0]) == [3.0]
""",
)


def test_a_measurement_that_tells_nothing_ends_no_job() -> None:
    result = run_job(3, STOPPED, code=0)
    assert result.stderr.count("cannot be told from the measurement at the start: ") == 1, result.stderr


def test_few_algorithms_have_few_peers(nursery: Nursery) -> None:
    """Each rank would connect to eleven others by the pairwise exchange between all hosts at once."""
    assert nursery.values(12, few_of, hosts=12)[0] == ["rounds", "1px4px3d", "1px4px3t", "1px4px3p"]


def few_of(comm: Communicator) -> list[str]:
    comm._core.set_tuning("")  # as before anything is measured: of costs of a loaded machine others would run
    return algorithms_of(comm, few=True)


@pytest.mark.parametrize(
    ("measured", "probe"),
    [
        ([("1px8p", 1 << 20, 0.02)], ""),
        ([("rounds", 1 << 17, 0.002)], ""),
        ([("1px8p", 1 << 17, 0.1)], ""),
        ([("rounds", 1 << 17, 0.002), ("1px8p", 1 << 17, 0.003)], "1px8p/32768"),
        ([("1px8d", 1 << 14, 0.001), ("1px8d", 1 << 17, 0.21), ("1px8p", 1 << 17, 0.2)], "1px8p/32768"),
    ],
    ids=["the largest size", "rounds alone", "a slow network", "quicker rounds", "losses of all"],
)
def test_what_tells_losses_from_a_slow_network(measured: list[tuple[str, int, float]], probe: str) -> None:
    assert costs._loss_probe([Measured(*one) for one in measured]) == probe


class OneRank:
    """A communicator whose allreduces take `seconds`, and `choosing` more after a change of algorithm."""

    is_broken, size = False, 1
    tuning = ""

    def __init__(self, seconds: float, choosing: float) -> None:
        self.now, self._seconds, self._choosing = 0.0, seconds, choosing
        self._core, self._is_chosen = self, False

    def set_tuning(self, text: str) -> None:
        self.tuning, self._is_chosen = text, False

    def allreduce(self, x: Any, **options: Any) -> Any:
        if options["name"] == "tune":
            self.now += self._seconds + self._choosing * (not self._is_chosen)
            self._is_chosen = True
        return x

    def barrier(self) -> None:
        self.now += 1e-6

    def broadcast_object(self, value: float) -> float:
        return value


@pytest.mark.parametrize(("seconds", "found"), [(5e-5, 5e-5), (0.01, 0.0101)], ids=["small", "large"])
def test_choosing_an_algorithm_is_no_part_of_what_it_takes(
    monkeypatch: pytest.MonkeyPatch, seconds: float, found: float
) -> None:
    """Of large arrays it hardly is, and one more call would cost much."""
    comm = OneRank(seconds, 1e-4)
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: comm.now)
    measured = measure(cast(Communicator, comm), ["rounds"], [1024], 1.0, lambda _: None, turn_seconds=0.0)
    assert [each.seconds for each in measured] == pytest.approx([found])
