"""Ranks on hosts that have networks of their own, and a host that vanishes."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from multiring.benchmarks.emulation.hosts import EmulatedHosts
from multiring.tuning.file import only
from tests.support import REPOSITORY

# After five seconds without an answer a peer is taken for lost; the kernels' probes are a second apart.
SECONDS = 12.0
# Who ends afterwards waits for nobody that is known to be lost.
SHUTDOWN_SECONDS = 3.0
# A connection that the kernel of a dead rank has closed is noticed at once.
CLOSED_SECONDS = 5.0

LOOP = """
import json, os, sys, time
import numpy as np
import multiring
from tests.support import Stopwatch
comm = multiring.init()
group = comm.split(0)  # open to the end
group.barrier()
print("running", flush=True)
watch = Stopwatch()
array = np.ones(int(sys.argv[1]), np.float32)
operations = {
    "allreduce": lambda: comm.allreduce(array),
    "broadcast": lambda: comm.broadcast(array, 0),
    "reduce_scatter": lambda: comm.reduce_scatter(array),
    "split": lambda: comm.split(0).close(),
    "named_queue": lambda: comm.named_queue().close(),
}
if sys.argv[2] == "send":  # for the first time, when the other one is gone
    while not os.path.exists(sys.argv[4]):
        time.sleep(0.01)
    operations["send"] = lambda: comm.send(array, int(sys.argv[3].split(",")[comm.rank]))
operation = operations[sys.argv[2]]
try:
    while True:
        operation()
except multiring.MultiringError as error:
    ended = time.monotonic() - watch.held_up()
    watch = Stopwatch()
    multiring.shutdown()
    print(json.dumps([type(error).__name__, str(error), ended, watch.seconds()]), flush=True)
"""
# Elements of what is exchanged at once, and of what is sent as messages in many segments.
SMALL, LARGE = "3", "3000000"

# What this host sends for one operation, by the kernel's count. After the barrier everybody has everything.
COUNT_BYTES = """
import numpy as np
import multiring
comm = multiring.init()
def sent():
    with open("/proc/net/dev") as lines:
        links = dict(line.split(":") for line in lines if ":" in line)
    return sum(int(fields.split()[8]) for name, fields in links.items() if name.strip() != "lo")
x = np.ones({count}, np.float32)
for _ in range(2):  # the first connects
    comm.barrier()
    before = sent()
    {operation}
    comm.barrier()
print(sent() - before)
"""

Ranks = list[subprocess.Popen[str]]


def start(hosts: EmulatedHosts, layout: Sequence[int], *script: str, job: int = 0, **env: str) -> Ranks:
    """Ranks as mpirun would start them, host by host; each job at once with others has another number."""
    shared = {
        "OMPI_COMM_WORLD_SIZE": str(sum(layout)),
        "PMIX_NAMESPACE": "test",
        "MULTIRING_STORE": f"tcp://{hosts.address(0)}:{29400 + job}",
        "MULTIRING_SECRET": secrets.token_hex(32),
        "MULTIRING_TIMEOUT": "60",
        "OMP_NUM_THREADS": "1",
    }
    places = [(host, local) for host, count in enumerate(layout) for local in range(count)]
    return [
        subprocess.Popen(
            hosts.command(host, [sys.executable, "-c", *script]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={
                **os.environ,
                **shared,
                **env,
                "OMPI_COMM_WORLD_RANK": str(rank),
                "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
                "OMPI_COMM_WORLD_LOCAL_SIZE": str(layout[host]),
            },
        )
        for rank, (host, local) in enumerate(places)
    ]


def assert_sent(ranks: Ranks, count: int, expected: Sequence[float]) -> None:
    """Each rank has sent so many times the bytes of the array."""
    for rank, (process, wanted) in enumerate(zip(ranks, expected, strict=True)):
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, f"rank {rank}: {errors}"
        assert int(output) / (4 * count) == pytest.approx(wanted, rel=0.1), rank


def test_bytes_tell_which_way_data_goes(emulate: Callable[..., EmulatedHosts], tmp_path: Path) -> None:
    """Bits do not: a setting that nobody follows would pass unseen."""
    tuning = tmp_path / "tuning.txt"
    tuning.write_text(only("rounds"))
    allreduce = "assert (comm.allreduce(x) == 3).all()"
    settings: list[tuple[str, dict[str, str], Sequence[float]]] = [
        (allreduce, {}, (4 / 3,) * 3),  # a third to each of the others, and the sums of one's own third back
        (allreduce, {"MULTIRING_TUNING": str(tuning)}, (2,) * 3),  # everything to each of the others
        (allreduce, {"MULTIRING_MODE": "1x3t"}, (2, 1, 1)),  # everything to the first, and the sums back
        ("assert (comm.allgather(x) == 1).all()", {}, (2, 2, 2)),
        # Of two rows the last rank keeps none, and sends both.
        ("assert (comm.reduce_scatter(x.reshape(2, -1)) == 3).all()", {}, (1 / 2, 1 / 2, 1)),
    ]
    hosts, count = emulate(3), 2_000_000
    for job, (operation, env, expected) in enumerate(settings):
        script = COUNT_BYTES.format(count=count, operation=operation)
        assert_sent(start(hosts, [1, 1, 1], script, job=job, **env), count, expected)


CABLED = """
import numpy as np
import multiring
from multiring import UsageError
comm = multiring.init()
x = np.arange(300_000.0) + comm.rank
total = comm.size * np.arange(300_000.0) + sum(range(comm.size))
assert comm.allreduce(x).tobytes() == total.tobytes()
assert comm.allreduce(x, order="any").tobytes() == total.tobytes()
assert (comm.broadcast(x, 1) == np.arange(300_000.0) + 1).all()
assert comm.allgather(x[:100_001]).size == comm.size * 100_001
assert comm.allgather_object(comm.rank) == list(range(comm.size))
block = np.array_split(total, comm.size)[comm.rank].tobytes()
assert comm.reduce_scatter(x).tobytes() == comm.reduce_scatter(x, order="any").tobytes() == block
assert comm.named_queue().allreduce(x[:7], name="x").tobytes() == total[:7].tobytes()
half = comm.split(comm.rank // 2)
assert half.allreduce(np.ones(3)).tolist() == [2, 2, 2]
try:
    comm.send(x, (comm.rank + 2) % comm.size)
except UsageError as error:
    print(error)
else:
    raise SystemExit("sent to a host that has no link")
"""


@pytest.mark.parametrize("cables", ["ring", "line"])
def test_hosts_that_reach_their_neighbours_only(emulate: Callable[..., EmulatedHosts], cables: str) -> None:
    """Between other hosts there is no way but the one by which ranks find each other."""
    hosts = emulate(4, None, cables)
    env = {"MULTIRING_HOST_LINKS": cables, "MULTIRING_INTERFACES": hosts.cables_network()}
    for process in start(hosts, [1] * 4, CABLED, **env):
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert "is no neighbour of" in output
    assert max(hosts.sent_bytes(host, 0) for host in range(4)) < 300_000, "the store alone goes there"


@pytest.mark.parametrize("cables", ["ring", "line"])
def test_a_loss_is_told_from_neighbour_to_neighbour(
    emulate: Callable[..., EmulatedHosts], cables: str
) -> None:
    """Of four jobs: a rank that is killed in rounds, one within a chain, one where rings may run (in a line
    they cannot), and a host that is cut off."""
    hosts, layout = emulate(4, None, cables), [1] * 4
    env = {"MULTIRING_HOST_LINKS": cables, "MULTIRING_INTERFACES": hosts.cables_network()}
    kinds = (
        (SMALL, "canonical", "allreduce"),
        (LARGE, "canonical", "allreduce"),
        (LARGE, "any", "reduce_scatter"),
        (LARGE, "canonical", "allreduce"),
    )
    jobs = [
        start(hosts, layout, LOOP, count, operation, job=job, MULTIRING_ORDER=order, **env)
        for job, (count, order, operation) in enumerate(kinds)
    ]
    for ranks in jobs[:3]:
        await_running(ranks)
        killed = time.monotonic()
        ranks[2].kill()
        ranks[2].communicate()
        for process in (*ranks[:2], ranks[3]):
            assert "lost rank 2 on emulated2" in told(process, killed, CLOSED_SECONDS)
    for name, lost, message in told_when_cut(hosts, layout, jobs[3:]):
        assert names_one(lost, message), (name, message)


def await_running(ranks: Ranks) -> None:
    for process in ranks:
        assert process.stdout.readline() == "running\n", process.communicate()
    time.sleep(0.2)  # somewhere in the middle


def told(process: subprocess.Popen[str], since: float, within: float) -> str:
    """The rank has raised PeerLostError in time, and shut down at once; its message."""
    output, errors = process.communicate(timeout=60)
    kind, message, at, shutdown = json.loads(output or "[]") or ("", errors, 0.0, 0.0)
    assert kind == "PeerLostError", message
    assert at - since < within, message
    assert shutdown < SHUTDOWN_SECONDS, message
    return str(message)


def names_one(lost: Sequence[str], message: str) -> bool:
    """Whether it is of one of those, `RANK on HOST`. A rank that this one was never connected with has no
    process number here, but a path and its error."""
    known = any(f"lost rank {one} (process " in message for one in lost)
    return known or ("No route to host" in message and any(f" lost rank {one}: " in message for one in lost))


def names_of(hosts: EmulatedHosts, layout: Sequence[int]) -> list[str]:
    """What messages call the ranks."""
    of_each = [hosts.name(host) for host, count in enumerate(layout) for _ in range(count)]
    return [f"{rank} on {name}" for rank, name in enumerate(of_each)]


# Among ten hosts most ranks are connected with few others.
@pytest.mark.parametrize("layout", [[2, 1, 2], [1] * 10])
def test_a_host_that_vanishes_is_lost_on_every_rank(
    emulate: Callable[..., EmulatedHosts], layout: list[int]
) -> None:
    """Of two jobs, one of which is in rounds and one within plans."""
    hosts = emulate(len(layout))
    counts = (SMALL, LARGE)
    jobs = [start(hosts, layout, LOOP, count, "allreduce", job=job) for job, count in enumerate(counts)]
    for name, lost, message in told_when_cut(hosts, layout, jobs):
        assert names_one(lost, message), (name, message)
        assert "or its host cannot be reached any more" in message


def told_when_cut(
    hosts: EmulatedHosts,
    layout: Sequence[int],
    jobs: Sequence[Ranks],
    host: int = 1,
    sign: Path | None = None,
) -> Iterator[tuple[str, list[str], str]]:
    """Cuts a host off, and makes the file `sign`; each rank, those on the other side, and its message."""
    names = names_of(hosts, layout)
    for ranks in jobs:
        await_running(ranks)
    cut = time.monotonic()
    hosts.cut(host)
    if sign is not None:
        sign.touch()
    here = [name for name in names if name.endswith(hosts.name(host))]
    for ranks in jobs:
        for name, process in zip(names, ranks, strict=True):
            lost = [other for other in names if (other in here) != (name in here)]
            yield name, lost, told(process, cut, SECONDS)


@pytest.mark.parametrize("host", [0, 1])  # the store is on the first
def test_a_host_that_vanishes_while_connections_are_made(
    emulate: Callable[..., EmulatedHosts], host: int, tmp_path: Path
) -> None:
    """What is new has no connections yet: those of its parent tell, or the interfaces of the host that is
    cut."""
    hosts, layout = emulate(3), [2, 1, 2]
    peers = "2,2,0,0,0" if host == 0 else "2,2,0,2,2"
    operations, sign = ["split", "named_queue", "send"], tmp_path / "cut"
    scripts = [(LOOP, SMALL, each, peers, str(sign)) for each in operations]
    jobs = [start(hosts, layout, *script, job=job) for job, script in enumerate(scripts)]
    told = told_when_cut(hosts, layout, jobs, host, sign)
    for number, (name, lost, message) in enumerate(told):
        operation = operations[number // sum(layout)]
        gone = name.endswith(hosts.name(host)) and "its network is gone, no interface" in message
        assert names_one(lost, message) or gone, message
        assert f"in {'send' if operation == 'send' else 'split'} " in message, message


def test_a_link_that_becomes_slow_loses_nobody(emulate: Callable[..., EmulatedHosts]) -> None:
    """Its queue is full: for longer than a heartbeat connections get no answers to what they have sent."""
    hosts = emulate(3, ["1gbit"])
    ranks = start(hosts, [1, 1, 1], LOOP, LARGE, "allreduce")
    try:
        await_running(ranks)
        for host in range(3):
            hosts.slow_down(host, "5mbit")
        with pytest.raises(subprocess.TimeoutExpired):  # an operation takes a minute
            ranks[0].wait(SECONDS)
        assert [process.poll() for process in ranks] == [None] * 3
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("layout", "operation", "count", "victim"),
    [
        ([2, 1, 2], "allreduce", SMALL, 4),
        ([2, 1, 2], "broadcast", LARGE, 2),
        ([1] * 10, "allreduce", LARGE, 7),
    ],
)
def test_a_killed_rank_is_named_on_every_host(
    emulate: Callable[..., EmulatedHosts], layout: list[int], operation: str, count: str, victim: int
) -> None:
    hosts = emulate(len(layout))
    ranks = start(hosts, layout, LOOP, count, operation)
    await_running(ranks)
    killed = time.monotonic()
    ranks[victim].kill()
    ranks.pop(victim).communicate(timeout=60)
    lost = names_of(hosts, layout)[victim]
    for process in ranks:
        message = told(process, killed, CLOSED_SECONDS)
        assert names_one([lost], message), message
