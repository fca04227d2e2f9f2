"""What each rank runs for `multiring doctor -H`, one on each host: whether hosts reach each other, and
what passes between them.

Every host calls every other one, between the interfaces that ranks would use, before any of them joins a
communicator: what is found names both ends. In each round of measuring the hosts form pairs, so that no two
measurements share a host.
"""

from __future__ import annotations

import json
import secrets
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from typing import Any

import numpy as np

import multiring
from multiring import _core, config, errors
from multiring.commands.doctor.host_probe import MARK, longer, machine_id
from multiring.communicator import Communicator
from multiring.rendezvous import launch_environment
from multiring.rendezvous.launch_environment import Placement
from multiring.store import Store, open_store

__all__ = ["Listener", "answer", "main", "probe", "reach", "rounds"]

_MAX_ROUNDS = 16
_ROUND_TRIPS = 20
_MIN_BYTES, _MAX_BYTES = 1 << 16, 1 << 26
# Long enough for a rate, short enough for many pairs; slow links take longer for their smallest message.
_ENOUGH_SECONDS = 0.06
_STORE_SECONDS = 10.0
_LATEST_SECONDS = 30.0  # until the last host has started, or called all others
# Enough for what a firewall lets pass, and twice sent again.
_CALL_SECONDS = 4.0
_CALLS_AT_ONCE = 64
_TOKEN_BYTES = 16


class Listener:
    """Listens on addresses of this host and sends each client a token; threads do it until it is closed.

    Args:
        addresses: The addresses.
        token: Of `_TOKEN_BYTES` bytes; a client that gets another one has reached another process.

    Attributes:
        ports: Where, for each address.

    Raises:
        OSError: An address cannot be listened on.
    """

    def __init__(self, addresses: Sequence[str], token: bytes) -> None:
        self._token = token
        with ExitStack() as stack:
            self._sockets = []
            for address in addresses:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                self._sockets.append(stack.enter_context(socket.create_server((address, 0), family=family)))
            stack.pop_all()
        self.ports: list[int] = [listening.getsockname()[1] for listening in self._sockets]
        for listening in self._sockets:
            threading.Thread(target=self._serve, args=(listening,), daemon=True).start()

    def close(self) -> None:
        """Listens no more."""
        for listening in self._sockets:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            listening.close()

    def _serve(self, listening: socket.socket) -> None:
        with suppress(OSError):  # closed
            while True:
                caller, _ = listening.accept()
                with caller, suppress(OSError):
                    caller.settimeout(_CALL_SECONDS)
                    caller.sendall(self._token)


def reach(source: str, address: str, port: int, token: bytes) -> str:
    """Why a `Listener` is not reached from an address of this host, or ""."""
    try:
        with socket.create_connection((address, port), _CALL_SECONDS, (source, 0)) as call:
            call.settimeout(_CALL_SECONDS)
            heard = call.recv(_TOKEN_BYTES, socket.MSG_WAITALL)
    except TimeoutError:
        return f"no answer within {_CALL_SECONDS:g} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return "" if heard == token else "somebody else answers there"


def _call_all(store: Store, placement: Placement) -> list[list[Any]]:
    """Rank and end of the caller, rank and end of the listener, and why it is not reached. Collective."""

    def gather(what: str, value: Any) -> list[Any]:
        store.set(f"doctor/{what}/{placement.rank}", json.dumps(value).encode())
        keys = [f"doctor/{what}/{rank}" for rank in range(placement.size)]
        return [json.loads(store.get(key, longer(_LATEST_SECONDS, placement.size))) for key in keys]

    def call(rank: int, other: Any, mine: int, its: int) -> list[Any]:
        if mine < 0:
            return [placement.rank, "", rank, "", "they have no address of one family (IPv4, IPv6)"]
        own, end = addresses[mine], other["addresses"][its]
        why = reach(own[1], end[1], other["ports"][its], bytes.fromhex(other["token"]))
        return [placement.rank, own[:2], rank, end[:2], why]

    addresses = _core.interface_addresses(config.load().interfaces)
    token = secrets.token_bytes(_TOKEN_BYTES)
    with closing(Listener([address for _, address, _ in addresses], token)) as listener:
        own = {"machine": machine_id(), "addresses": addresses, "ports": listener.ports}
        calls = []
        for rank, other in enumerate(gather("ends", {**own, "token": token.hex()})):
            theirs = [tuple(address) for address in other["addresses"]]
            if other["machine"] != own["machine"]:
                pairs = _core.pair_addresses(addresses, theirs) or [(-1, -1)]
                calls += [(rank, other, *pair) for pair in pairs]
        with ThreadPoolExecutor(_CALLS_AT_ONCE) as pool:
            found = [one for one in pool.map(lambda each: call(*each), calls) if one[-1]]
        return [one for each in gather("unreached", found) for one in each]


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Pairs of `count` hosts, in rounds in which each host is in one pair at most: all pairs, or where that
    takes too many rounds, neighbours."""
    participants = [*range(count), *([-1] if count % 2 else [])]
    found = []
    for _ in range(len(participants) - 1):
        half = len(participants) // 2
        pairs = zip(participants[:half], reversed(participants[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        participants = [participants[0], participants[-1], *participants[1:-1]]
    if len(found) <= _MAX_ROUNDS:
        return found
    neighbours = [(host, (host + 1) % count) for host in range(count)]
    last = [neighbours.pop()] if count % 2 else []
    return [part for part in (neighbours[::2], neighbours[1::2], last) if part]


def main() -> int:
    """Prints that the launcher is not reached; on rank 0 what `_call_all` gives and, where that is nothing,
    [sender, receiver, bytes per second, seconds of latency] for what was measured."""
    placement = launch_environment.detect()
    try:
        store = open_store(placement.store_url, placement.secret, _STORE_SECONDS)
    except errors.MultiringError as error:
        _tell({"launcher": [placement.rank, str(error)]})
        return 0
    try:
        with store:
            unreached = _call_all(store, placement)
    except errors.TimeoutError:
        return 0  # the rank that is missing tells why
    measured = [] if unreached or placement.size == 1 else _measure()
    if placement.rank == 0:
        _tell({"unreached": unreached, "measured": measured})
    return 0


def _tell(found: dict[str, Any]) -> None:
    print(f"{MARK}{json.dumps(found)}", flush=True)


def _measure() -> list[tuple[int, int, float, float]]:
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
    multiring.shutdown()
    return measured


def probe(comm: Communicator, receiver: int) -> tuple[float, float]:
    """Bytes per second and half the time of a round trip to `receiver`, which calls `answer`."""
    little = np.zeros(1, np.uint8)
    trips = [_round_trip(comm, little, receiver) for _ in range(_ROUND_TRIPS)]
    latency = statistics.median(trips) / 2
    size = _MIN_BYTES
    while True:
        message = np.zeros(size, np.uint8)
        seconds = _round_trip(comm, message, receiver)
        if seconds > _ENOUGH_SECONDS or size == _MAX_BYTES:
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
