"""Where the ranks of a launcher meet that serves no store of ours.

Some can hand a few words of rank 0 to all ranks: then these are about a store that it offers. Else all know
where the store is, but not whether what they find there is of their own job: a launcher may start one program
after the other (`mpirun sh -c "python a.py; python b.py"`), and a rank of the second one may come while rank
0 of the first one is about to leave. So each rank writes a random number into the store, and goes on when
rank 0 has confirmed that number.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from multiring import _core, errors
from multiring.errors import PeerLostError, UsageError
from multiring.store import Store, TcpStoreServer

if TYPE_CHECKING:
    from multiring.settings import Settings

__all__ = [
    "HOW_TO_SILENCE",
    "Party",
    "agree_on_secret",
    "meet",
    "offer_store",
    "ranks_text",
    "signed",
    "signed_in",
]

_log = logging.getLogger("multiring")

# Rank 0 leaves this word in the place of a secret that the user has given to all ranks.
_OWN_SECRET = b"own"
# How a warning of a long wait ends.
HOW_TO_SILENCE = "; set MULTIRING_STALL_WARNING to change or silence this warning"

# Who may have come to a store of others looks so often whether it still is that.
_LOOK_SECONDS = 0.1

# So long rank 0 gives ranks of another job, whose meeting it may have interrupted, to say so.
_OTHER_SECONDS = 3.0

# More addresses than this are of containers; what ranks tell each other has an end.
_MAX_ADDRESSES = 16


class Party(NamedTuple):
    """The ranks that meet, for those who meet others in the same place.

    Attributes:
        name: What they are called, such as the launcher's name of the job; empty: not known.
        advice: What to do about others.
    """

    name: str = ""
    advice: str = (
        "both were told the same MULTIRING_STORE and MULTIRING_SECRET; give each job a store and a secret of "
        "its own"
    )


_UNNAMED = Party()


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
    published = [*wanted[:_MAX_ADDRESSES], "::1" if only_ipv6 else "127.0.0.1"]
    return {
        "job": secrets.token_hex(8),
        "addresses": [(host, server.port) for host in published],
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
    party: Party = _UNNAMED,
    warn_after: float = 0.0,
) -> tuple[Store, str]:
    """Brings the ranks together that have been told the same store. Collective.

    Args:
        rank: This rank.
        size: Number of ranks.
        prefix: How the keys of this meeting begin.
        timeout: Seconds within which all have to come.
        reopen: Opens the store within so many seconds, once more if it was that of ranks that have left.
        call: What the ranks call to meet, for messages.
        party: What these ranks are.
        warn_after: Seconds after which a rank says in the log who is missing; 0: it does not.

    Returns:
        The store, and how keys begin that nobody has used before.

    Raises:
        UsageError: The store cannot be opened, or another job uses it.
        TimeoutError: Ranks are missing after `timeout` seconds; says which.
    """
    deadline = time.monotonic() + timeout
    with ExitStack() as stack:
        while True:
            store = stack.enter_context(reopen(max(0.1, deadline - time.monotonic())))
            try:
                meeting = _Meeting(store, prefix, rank, size, party)
                take_part = meeting.lead if rank == 0 else meeting.join
                name = take_part(deadline, call, warn_after)
                stack.pop_all()
                return store, f"{prefix}{name}/"
            except PeerLostError:  # it was that of ranks that have left
                if rank == 0 or time.monotonic() >= deadline:
                    raise
                stack.close()


class _Meeting:
    """The meeting that rank 0 calls, as one rank sees it.

    Keys after the prefix: `meeting`, the name that rank 0 has given it, and its job; `NAME/ranks/RANK`, the
    number of a rank that has signed in; `NAME/confirmed`, the numbers that rank 0 has found; `NAME/other`,
    the job of ranks whose own meeting was under way when this one was called.
    """

    def __init__(self, store: Store, prefix: str, rank: int, size: int, party: Party) -> None:
        self._store, self._prefix = store, prefix
        self._rank, self._size, self._job, self._advice = rank, size, party.name, party.advice
        self._name = ""  # of the meeting that this rank takes part in

    def lead(self, deadline: float, call: str, warn_after: float) -> str:
        """Rank 0's part; the name of the meeting."""
        before = signed(self._store, f"{self._prefix}meeting", 0.0) or ""
        self._name = name = secrets.token_hex(8)
        self._store.set(f"{self._prefix}meeting", f"{name} {self._job}".encode())
        entries = [f"{self._prefix}{name}/ranks/{other}" for other in range(1, self._size)]
        at = f"{call} at the {self._store}"
        present = signed_in(entries, self._await_entry, deadline, warn_after, at)
        if missing := [other for other, number in enumerate(present, 1) if number is None]:
            raise errors.TimeoutError(
                f"rank {self._rank} of {self._size} has waited at the {self._store} for "
                f"{ranks_text(missing)}: they have not called {call}, cannot get there, or were told another "
                "store or secret; look at the output of every rank, or wait longer (MULTIRING_TIMEOUT, or "
                "the timeout passed)",
                rank=self._rank,
                peer=missing[0],
            )
        if self._is_foreign(before.partition(" ")[2]):  # of a job that has met long ago, or is about to
            self._check_other(_OTHER_SECONDS)
        # Once more: who signed in first may have been started again while the last were awaited.
        numbers = json.dumps([signed(self._store, entry, 0.0) for entry in entries])
        self._store.set(f"{self._prefix}{name}/confirmed", numbers.encode())
        return name

    def join(self, deadline: float, call: str, warn_after: float) -> str:
        """The others' part: signs in wherever rank 0 calls, until it confirms this rank's number."""
        number, began = secrets.token_hex(8), time.monotonic()
        is_told = not warn_after
        while (left := deadline - time.monotonic()) > 0:
            if not is_told and (waited := time.monotonic() - began) > warn_after:
                is_told = True
                _log.warning(
                    f"rank {self._rank} of {self._size} has waited {waited:.1f} s in {call} at the "
                    f"{self._store} for rank 0, or for ranks that it waits for{HOW_TO_SILENCE}"
                )
            if (name := self._called(min(_LOOK_SECONDS, left))) is None:
                continue
            if name != self._name:
                self._name = name
                self._store.set(f"{self._prefix}{name}/ranks/{self._rank}", number.encode())
            present = signed(self._store, f"{self._prefix}{name}/confirmed", min(_LOOK_SECONDS, left))
            if present is not None and number in json.loads(present):
                return name
            if present is not None:  # those were others
                time.sleep(min(_LOOK_SECONDS / 4, left))
        why = "called others" if self._name else f"not called {call}"
        raise errors.TimeoutError(
            f"rank {self._rank} of {self._size} has waited at the {self._store} for rank 0, which has {why}, "
            "or waits for ranks that do not come; look at the output of every rank, or wait longer "
            "(MULTIRING_TIMEOUT, or the timeout passed)",
            rank=self._rank,
            peer=0,
        )

    def _await_entry(self, entry: str, deadline: float) -> str | None:
        """The number that a rank signs in with; None: it has not come in time."""
        while True:
            left = max(0.0, deadline - time.monotonic())
            number = signed(self._store, entry, min(_LOOK_SECONDS, left))
            self._called(0.0)
            if number is not None or not left:
                return number

    def _called(self, timeout: float) -> str | None:
        """The name of the meeting that rank 0 of this job calls; None: it has called none by now.

        Raises:
            UsageError: Another job meets here at the same time.
        """
        called = signed(self._store, f"{self._prefix}meeting", timeout)
        if called is None:
            return None
        name, _, job = called.partition(" ")
        if not self._is_foreign(job):
            self._check_other(0.0)
            return name
        other = f"{self._prefix}{name}/other"
        if self._name:
            self._store.set(other, self._job.encode())
        if self._name or signed(self._store, other, 0.0) == self._job:
            raise self._clash(job)
        time.sleep(timeout)  # it may have met long ago
        return None

    def _is_foreign(self, job: str) -> bool:
        return bool(self._job and job and job != self._job)

    def _check_other(self, timeout: float) -> None:
        """Raise UsageError if ranks of another job have found this meeting in the place of their own."""
        name = self._name
        if name and self._job and (other := signed(self._store, f"{self._prefix}{name}/other", timeout)):
            raise self._clash(other)

    def _clash(self, other: str) -> UsageError:
        return UsageError(
            f"rank {self._rank} of {self._size} of {self._job} has met {other} at the "
            f"{self._store}: {self._advice}",
            rank=self._rank,
        )


def signed_in(
    entries: Sequence[str],
    read: Callable[[str, float], str | None],
    deadline: float,
    warn_after: float,
    at: str,
) -> list[str | None]:
    """What ranks 1, 2, ... sign in with, for rank 0; None: one has not come in time.

    Args:
        entries: Their keys.
        read: Awaits the value of a key until a time of `time.monotonic`.
        deadline: That time.
        warn_after: Seconds after which those who are missing are named in the log; 0: never.
        at: Where they are awaited, for that.
    """
    began = time.monotonic()
    first = min(deadline, began + (warn_after or math.inf))
    present = [read(entry, first) for entry in entries]
    late = [rank for rank, number in enumerate(present, 1) if number is None]
    if late and first < deadline:
        _log.warning(
            f"rank 0 of {len(entries) + 1} has waited {time.monotonic() - began:.1f} s in {at} for "
            f"{ranks_text(late)}: still importing, not started, failed before, or told another store or "
            f"secret{HOW_TO_SILENCE}"
        )
    return [number or read(entry, deadline) for entry, number in zip(entries, present, strict=True)]


def agree_on_secret(store: Store, key: str, rank: int, settings: Settings) -> bytes:
    """Return the secret by which the ranks know each other's connections. Collective.

    Rank 0 makes it and leaves it in the store, unless the user has given one to all ranks. A process that can
    read the store can join.

    Args:
        store: Where the ranks meet.
        key: A key of the store that nothing else uses.
        rank: This rank.
        settings: Of this process.

    Raises:
        UsageError: Rank 0 has MULTIRING_SECRET, and this rank has not.
        TimeoutError: Rank 0 is missing.
    """
    if rank == 0:
        made = settings.secret or secrets.token_bytes(32)
        store.set(key, _OWN_SECRET if settings.secret else made.hex().encode())
        return made
    try:
        found = store.get(key, settings.timeout)
    except errors.TimeoutError as error:
        raise errors.TimeoutError(f"rank {rank} waits for rank 0: {error}", rank=rank, peer=0) from error
    if found != _OWN_SECRET:
        return bytes.fromhex(found.decode())
    if settings.secret is None:
        raise UsageError("rank 0 has a MULTIRING_SECRET and this rank has none: set it on all ranks")
    return settings.secret


def signed(store: Store, key: str, timeout: float) -> str | None:
    """What a rank has set a key to; None: none has in time."""
    try:
        return store.get(key, timeout).decode()
    except errors.TimeoutError:
        return None


def ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 1" or "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
