"""`multiring.ray.run` with the real Ray: a cluster of two nodes on this machine."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multiring import errors
from tests.support import REPOSITORY, Job, process_exists, wait_until

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'multiring[ray]'")

import multiring.ray  # noqa: E402
from multiring.ray import RankError  # noqa: E402
from multiring.ray.job import _by_node, _slots  # noqa: E402
from multiring.ray.worker import Location, Worker  # noqa: E402

PROCESSORS = 2  # of each node, as far as Ray knows
QUIET = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster that this process has joined."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        head = {"num_cpus": PROCESSORS, "include_dashboard": False}
        found = Cluster(initialize_head=True, head_node_args=head)
        try:
            found.add_node(num_cpus=PROCESSORS)
            ray.init(address=found.address, log_to_driver=False)
            yield found.address
        finally:
            ray.shutdown()
            found.shutdown()


def places(scale: float, *, name: str) -> dict[str, Any]:
    """What a rank sees."""
    comm = multiring.init()
    total = comm.allreduce(np.full(3, scale * (comm.rank + 1)))
    ids = (comm.rank, comm.local_rank, comm.local_size, comm.cross_rank, comm.cross_size)
    node = ray.get_runtime_context().get_node_id()
    environ = {key: os.environ.get(key) for key in ("TOLD", "OMP_NUM_THREADS", "MULTIRING_STALL_WARNING")}
    return {"name": name, "total": total.tolist(), "ids": ids, "node": node, "pid": os.getpid(), **environ}


def fail(directory: str, how: str) -> None:
    """Rank 1 fails while the others wait for it, or does not return."""
    comm = multiring.init()
    (Path(directory) / f"pid{comm.rank}").write_text(str(os.getpid()))
    comm.barrier()
    if comm.rank == 1:
        if how == "raise":
            raise ValueError("an odd number")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            time.sleep(0.05)
    if how != "late":
        comm.barrier()


def assert_ended(directory: Path) -> None:
    """Those that have come as far as to tell their process id."""
    pids = [int(path.read_text()) for path in directory.glob("pid?")]
    wait_until(lambda: not any(map(process_exists, pids)), "the end of the workers")


LOCAL = """
import ray
import multiring
import multiring.ray

def rank(scale):  # of the main script
    return multiring.init().rank * scale

if __name__ == "__main__":
    print(multiring.ray.run(rank, 1, args=(5,)), ray.is_initialized())
"""


def test_ray_is_started_where_there_is_none_and_shut_down_again(tmp_path: Path) -> None:
    """The first test of this file: later ones have a Ray, which would be found."""
    script = tmp_path / "main.py"
    script.write_text(LOCAL)
    with Job(lambda root: [sys.executable, str(script)], QUIET, cwd=REPOSITORY) as job:
        done = job.finish(180.0)  # Ray takes its time to start
    assert done.stdout == "[0] False\n", done.stderr


def test_a_machine_that_is_too_small_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def start(address: str, **options: object) -> None:
        asked.append(address)
        if address == "auto":
            raise ConnectionError("there is no Ray")

    fakes = {"init": start, "is_initialized": lambda: False, "shutdown": lambda: asked.append("shutdown")}
    resources = {"CPU": 2.0, "node:10.0.0.1": 1.0}
    fakes |= {"cluster_resources": lambda: resources, "available_resources": lambda: resources}
    for name, fake in fakes.items():
        monkeypatch.setattr(ray, name, fake)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(errors.UsageError) as caught:
        multiring.ray.run(len, 2, cpus_per_worker=2)
    assert "no room for 2 workers of 2 CPU each: the cluster has 2 CPU, 2 of them free" in str(caught.value)
    assert asked == ["auto", "local", "shutdown"]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    with pytest.raises(ConnectionError):
        multiring.ray.run(len, 1)


def test_the_end_of_a_program_is_no_failure() -> None:
    assert Worker().run(sys.exit, (0,), {}) is None
    with pytest.raises(RuntimeError, match=r"sys\.exit\(3\)"):
        Worker().run(sys.exit, (3,), {})


def test_ranks_are_numbered_by_node_and_reach_each_other(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MULTIRING_STALL_WARNING", "7")
    found = multiring.ray.run(places, 3, args=(2.0,), kwargs={"name": "x"}, env={"TOLD": "yes"})
    assert [rank["total"] for rank in found] == [[12.0] * 3] * 3
    assert len({rank["pid"] for rank in found}) == 3
    assert all(rank["TOLD"] == "yes" and rank["name"] == "x" for rank in found)
    assert all(rank["OMP_NUM_THREADS"] == "1" and rank["MULTIRING_STALL_WARNING"] == "7" for rank in found)
    first = [rank["node"] for rank in found].count(found[0]["node"])
    assert first in (1, 2)
    assert [rank["node"] for rank in found[:first]] == [found[0]["node"]] * first
    expected = {
        2: [(0, 0, 2, 0, 2), (1, 1, 2, 0, 2), (2, 0, 1, 1, 2)],
        1: [(0, 0, 1, 0, 2), (1, 0, 2, 1, 2), (2, 1, 2, 1, 2)],
    }
    assert [rank["ids"] for rank in found] == expected[first]


@pytest.mark.parametrize(
    ("how", "words", "cause"),
    [
        ("raise", "raised ValueError: an odd number", ValueError),
        ("kill", " died: ", ray.exceptions.RayActorError),
    ],
)
def test_a_rank_that_fails_is_named(
    cluster: str, tmp_path: Path, how: str, words: str, cause: type[Exception]
) -> None:
    with pytest.raises(RankError) as caught:
        multiring.ray.run(fail, 2, args=(str(tmp_path), how), timeout=60)
    pid = (tmp_path / "pid1").read_text()
    assert str(caught.value).startswith(f"rank 1 (process {pid} on ")
    assert words in str(caught.value)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, cause)
    assert_ended(tmp_path)


def test_a_time_limit_ends_all(cluster: str, tmp_path: Path) -> None:
    with pytest.raises(errors.TimeoutError, match=r"longer than timeout=2 s; .* not returned: (0, )?1$"):
        multiring.ray.run(fail, 2, args=(str(tmp_path), "late"), timeout=2)
    assert_ended(tmp_path)
    wait_until(lambda: ray.available_resources().get("CPU") == 2 * PROCESSORS, "the processors to be free")


def test_more_workers_than_the_cluster_holds_are_not_waited_for_without_end(cluster: str) -> None:
    with pytest.raises(errors.TimeoutError) as caught:
        multiring.ray.run(len, 5, start_timeout=1)
    assert "no room for 5 workers of 1 CPU each: the cluster has 4 CPU" in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_workers": 0}, "num_workers=0"),
        ({"num_workers": 1, "cpus_per_worker": 0}, "not 0 for both"),
        ({"num_workers": 1, "gpus_per_worker": -1}, "no negative number"),
        ({"num_workers": 1, "env": {"MULTIRING_TIMEOUT": "soon"}}, "MULTIRING_TIMEOUT: 'soon' is not accept"),
    ],
)
def test_wrong_arguments_are_told_before_ray_is_asked(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.UsageError, match=words):
        multiring.ray.run(len, **wrong)


def test_ranks_of_a_node_follow_each_other() -> None:
    mixed = [Location(node, "10.0.0.1", 1) for node in "abacb"]
    order = _by_node(mixed)
    assert order == [0, 2, 1, 4, 3]
    rank_slots = _slots([mixed[index] for index in order])
    found = [(slot.local_rank, slot.local_size, slot.cross_rank) for slot in rank_slots]
    assert found == [(0, 2, 0), (1, 2, 0), (0, 2, 1), (1, 2, 1), (0, 1, 2)]
    assert all(slot.cross_size == 3 for slot in rank_slots)
