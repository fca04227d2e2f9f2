"""Where the ranks of a launcher meet that serves no store of ours.

Some can hand a few words of rank 0 to all ranks: then these are about a store that it offers. Else all know
where the store is, but not whether what they find there is of their own job: a launcher may start one program
after the other (`mpirun sh -c "python a.py; python b.py"`), and a rank of the second one may come while rank
0 of the first one is about to leave. So rank 0 calls a roll: each rank signs in with a number made for this
occasion, and goes on when rank 0 has read out that number.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from multiring import _core, errors
from multiring.errors import PeerLostError, UsageError
from multiring.store import Store, TcpStoreServer

__all__ = ["meet", "offer_store", "ranks_text", "signed"]

# Who may have come to a store of others looks so often whether it still is that.
_LOOK_SECONDS = 0.1

# More addresses than this are of containers; what ranks tell each other has an end.
_MOST_ADDRESSES = 16


def offer_store(interfaces: Sequence[str], secret: bytes | None = None) -> dict[str, Any]:
    """What rank 0 tells the others of a new job, whose store it serves from now on as long as it lives.

    Args:
        interfaces: The network interfaces through which others may come; empty: all.
        secret: Lets others in; None: one that is made for this process.

    Returns:
        "job": a name that no other job has; "addresses": where the store may be reached, each as host and
        port, the last one from this host only; "secret": what lets others in, in hexadecimal digits.

    Raises:
        UsageError: There is no such interface.
    """
    addresses: list[str] = []
    try:
        addresses = _core.own_addresses(list(interfaces))
    except UsageError:
        if interfaces:
            raise  # or else the host has no network, and all ranks are on it
    wanted = [each for each in addresses if ":" not in each] or addresses  # one family: a port listens on one
    only_ipv6 = bool(wanted) and ":" in wanted[0]
    server, served = _serve("::" if only_ipv6 else "0.0.0.0", secret)
    told = [*wanted[:_MOST_ADDRESSES], "::1" if only_ipv6 else "127.0.0.1"]
    return {
        "job": secrets.token_hex(8),
        "addresses": [(host, server.port) for host in told],
        "secret": served.hex(),
    }


@functools.cache
def _serve(host: str, secret: bytes | None) -> tuple[TcpStoreServer, bytes]:
    """Serves a store as long as this process lives, for one job after the other, and its secret."""
    secret = secret or secrets.token_bytes(32)
    server = TcpStoreServer(host, 0, secret)
    process = os.getpid()
    atexit.register(lambda: server.close() if os.getpid() == process else None)  # not of a fork
    return server, secret


def meet(
    rank: int,
    size: int,
    prefix: str,
    timeout: float,
    reopen: Callable[[float], Store],
    call: str = "multiring.init()",
) -> tuple[Store, str]:
    """Brings the ranks together that have been told the same store. Collective.

    Args:
        rank: This rank.
        size: Number of ranks.
        prefix: How the keys of this meeting begin.
        timeout: Seconds within which all have to come.
        reopen: Opens the store within so many seconds, once more if it was that of ranks that have left.
        call: What the ranks call to meet, for messages.

    Returns:
        The store, and how keys begin that nobody has used before.

    Raises:
        UsageError: The store cannot be opened.
        TimeoutError: Ranks are missing after `timeout` seconds; says which.
    """
    deadline = time.monotonic() + timeout
    with ExitStack() as stack:
        while True:
            store = stack.enter_context(reopen(max(0.1, deadline - time.monotonic())))
            try:
                take_part = _call if rank == 0 else _answer
                name = take_part(store, (rank, size), prefix, deadline, call)
                stack.pop_all()
                return store, f"{prefix}{name}/"
            except PeerLostError:  # it was that of ranks that have left
                if rank == 0 or time.monotonic() >= deadline:
                    raise
                stack.close()


def _call(store: Store, place: tuple[int, int], prefix: str, deadline: float, call: str) -> str:
    """Rank 0's part; the name of the meeting."""
    rank, size = place
    name = secrets.token_hex(8)
    store.set(f"{prefix}roll", name.encode())
    entries = [f"{prefix}{name}/roll/{other}" for other in range(1, size)]
    present = [signed(store, entry, max(0.0, deadline - time.monotonic())) for entry in entries]
    if missing := [other for other, number in enumerate(present, 1) if number is None]:
        raise errors.TimeoutError(
            f"rank {rank} of {size} has waited at the {store} for {ranks_text(missing)}: they have "
            f"not called {call}, cannot get there, or were told another store or secret; look at "
            "the output of every rank, or wait longer (MULTIRING_TIMEOUT, or the timeout passed)",
            rank=rank,
            peer=missing[0],
        )
    # Once more: who signed in first may have been started again while the last were awaited.
    store.set(f"{prefix}{name}/roll", json.dumps([signed(store, entry, 0.0) for entry in entries]).encode())
    return name


def _answer(store: Store, place: tuple[int, int], prefix: str, deadline: float, call: str) -> str:
    """The others' part: signs in wherever rank 0 calls, until it reads out this rank's number."""
    rank, size = place
    number, name = secrets.token_hex(8), ""
    while (left := deadline - time.monotonic()) > 0:
        if (called := signed(store, f"{prefix}roll", min(_LOOK_SECONDS, left))) is None:
            continue
        if called != name:
            name = called
            store.set(f"{prefix}{name}/roll/{rank}", number.encode())
        present = signed(store, f"{prefix}{name}/roll", min(_LOOK_SECONDS, left))
        if present is not None and number in json.loads(present):
            return name
        if present is not None:  # those were others
            time.sleep(min(_LOOK_SECONDS / 4, left))
    why = "called others" if name else f"not called {call}"
    raise errors.TimeoutError(
        f"rank {rank} of {size} has waited at the {store} for rank 0, which has {why}, or waits for "
        "ranks that do not come; look at the output of every rank, or wait longer (MULTIRING_TIMEOUT, or the "
        "timeout passed)",
        rank=rank,
        peer=0,
    )


def signed(store: Store, key: str, timeout: float) -> str | None:
    """What a rank has set a key to; None: none has in time."""
    try:
        return store.get(key, timeout).decode()
    except errors.TimeoutError:
        return None


def ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 1" or "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
