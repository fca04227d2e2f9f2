"""A rank of the soak: operations drawn alike on all ranks, checked, until something is done to one of them.

    python soak_rank.py SEED EVENT VICTIM AT

Until the event the ranks go on without end; EVENT "none" ends them well after AT operations. "kill" and
"stop" come AT milliseconds after the program has begun, wherever it is by then; the other events at operation
AT.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

import multiring
from multiring import Communicator

BY_TIME = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
WRONG = "WRONG RESULT"


def at_operation(event: str, comm: Communicator) -> None:
    if event == "leave":
        sys.exit(0)
    if event == "vanish":
        os._exit(7)
    if event == "raise":
        raise RuntimeError("as the soak has it")
    if event == "mismatch":
        comm.allreduce(np.ones(5), name="another one")


def check(what: str, found: object, expected: object) -> None:
    if not np.array_equal(found, expected):
        print(f"{WRONG} of {what}: {found} for {expected}", flush=True)
        os._exit(9)


def allreduce(comm: Communicator, number: random.Random) -> None:
    count = number.choice([0, 1, 3, 1000, 300_001])
    total = comm.size * (comm.size + 1) / 2
    check("allreduce", comm.allreduce(np.full(count, comm.rank + 1.0), op="sum"), np.full(count, total))


def in_flight(comm: Communicator, number: random.Random) -> None:
    arrays = [np.full(number.choice([1, 70_000]), comm.rank + 1.0) for _ in range(5)]
    works = [comm.allreduce_async(array, op="max", out=array) for array in arrays]
    for work, array in zip(works, arrays, strict=True):
        work.wait()
        check("allreduce_async", array, np.full(array.size, comm.size))


def broadcast(comm: Communicator, number: random.Random) -> None:
    root, count = number.randrange(comm.size), number.choice([1, 100_000])
    check("broadcast", comm.broadcast(np.full(count, comm.rank), root), np.full(count, root))


def objects(comm: Communicator, number: random.Random) -> None:
    size = number.choice([1, 50_000])
    check("allgather_object", [len(each) for each in comm.allgather_object("x" * (size + comm.rank))],
          [size + rank for rank in range(comm.size)])  # fmt: skip


def ring(comm: Communicator, number: random.Random) -> None:
    count = number.choice([1, 10_000])  # fits a mailbox: all send first
    comm.send(np.full(count, comm.rank), (comm.rank + 1) % comm.size) if comm.size > 1 else None
    if comm.size > 1:
        before = (comm.rank - 1) % comm.size
        check("recv", comm.recv(before), np.full(count, before))


def group(comm: Communicator, number: random.Random) -> None:
    part = comm.split(comm.rank % number.choice([1, 2]))
    assert part is not None
    allreduce(part, number)
    part.close()


def named(comm: Communicator, number: random.Random) -> None:
    queue = comm.named_queue()
    names = ["a", "b", "c"]
    random.Random(comm.rank).shuffle(names)
    works = [queue.allreduce_async(np.ones(10), op="sum", name=name) for name in names]
    for work in works:
        check("a named operation", work.wait(), np.full(10, comm.size))
    queue.close()


OPERATIONS: list[Callable[[Communicator, random.Random], None]] = [
    allreduce, in_flight, broadcast, objects, ring, group, named,
]  # fmt: skip


def main() -> None:
    seed, event, victim, at = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    mine = int(os.environ.get("MULTIRING_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))) == victim
    if mine and event in BY_TIME:
        threading.Timer(at / 1000, lambda: os.kill(os.getpid(), BY_TIME[event])).start()
    comm = multiring.init()
    print("joined", flush=True)
    number = random.Random(seed)
    for place in range(10**9):
        if place == at and event == "none":
            return
        if place == at and mine and event not in BY_TIME:
            at_operation(event, comm)
        number.choice(OPERATIONS)(comm, number)
        if number.random() < 0.02:
            time.sleep(0.05)


if __name__ == "__main__":
    main()
