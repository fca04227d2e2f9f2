"""What each rank runs for `multiring doctor -H`, one rank on each host: measures what passes between them.

In each round the hosts form pairs, so that no two measurements share a host.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import numpy as np

import multiring
from multiring.commands.doctor.host_findings import LINKS_MARK
from multiring.communicator import Communicator

__all__ = ["answer", "main", "probe", "rounds"]

_MOST_ROUNDS = 16
_ROUND_TRIPS = 20
_LEAST_BYTES, _MOST_BYTES = 1 << 16, 1 << 26
# Long enough for a rate, short enough for many pairs; slow links take longer for their smallest message.
_ENOUGH_SECONDS = 0.06


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Pairs of `count` hosts, in rounds in which each host is in one pair at most: all pairs, or where that
    takes too many rounds, neighbours."""
    places = [*range(count), *([-1] if count % 2 else [])]
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        places = [places[0], places[-1], *places[1:-1]]
    if len(found) <= _MOST_ROUNDS:
        return found
    neighbours = [(host, (host + 1) % count) for host in range(count)]
    last = [neighbours.pop()] if count % 2 else []
    return [part for part in (neighbours[::2], neighbours[1::2], last) if part]


def main() -> int:
    """Rank 0 prints [sender, receiver, bytes per second, seconds of latency] for what was measured."""
    comm = multiring.init()
    own: list[tuple[int, int, float, float]] = []
    for pairs in rounds(comm.size):
        for one, other in pairs:
            for sender, receiver in ((one, other), (other, one)):
                if comm.rank == sender:
                    own.append((sender, receiver, *probe(comm, receiver)))
                elif comm.rank == receiver:
                    answer(comm, sender)
        comm.barrier()
    measured = [row for rows in comm.allgather_object(own) for row in rows]
    if comm.rank == 0:
        print(f"{LINKS_MARK}{json.dumps(measured)}", flush=True)
    multiring.shutdown()
    return 0


def probe(comm: Communicator, receiver: int) -> tuple[float, float]:
    """Bytes per second and half the time of a round trip to `receiver`, which calls `answer`."""
    little = np.zeros(1, np.uint8)
    trips = [_round_trip(comm, little, receiver) for _ in range(_ROUND_TRIPS)]
    latency = statistics.median(trips) / 2
    size = _LEAST_BYTES
    while True:
        message = np.zeros(size, np.uint8)
        seconds = _round_trip(comm, message, receiver)
        if seconds > _ENOUGH_SECONDS or size == _MOST_BYTES:
            break
        size *= 2
    # Once more: somebody else may have had the processor. Smaller messages do not count: some links let a
    # burst pass before they limit anything.
    seconds = min(seconds, _round_trip(comm, message, receiver)) - latency
    comm.send(np.ones(1, np.uint8), receiver)
    return size / max(seconds, 1e-9), latency


def _round_trip(comm: Communicator, message: np.ndarray[tuple[int], np.dtype[np.uint8]], peer: int) -> float:
    began = time.perf_counter()
    comm.send(message, peer)
    comm.recv(peer)
    return time.perf_counter() - began


def answer(comm: Communicator, sender: int) -> None:
    """Confirms each message of `probe` until the one that is a one."""
    confirmation = np.zeros(1, np.uint8)
    while True:
        message = comm.recv(sender)
        if message.size == 1 and message[0] == 1:
            return
        comm.send(confirmation, sender)


if __name__ == "__main__":
    sys.exit(main())
