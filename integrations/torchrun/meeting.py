"""Where the ranks of a job on several hosts meet that torchrun has started: its own store says so.

torchrun serves a store for torch.distributed. Rank 0 serves one of ours beside it, and leaves there where
that is and a secret for it. Each rank writes a random number into rank 0's store and goes on when rank 0 has
confirmed that number.

Why confirm: what lies in torchrun's store may be of ranks that are gone, since it outlives restarts, and no
variable numbers these alike on all hosts (TORCHELASTIC_RESTART_COUNT leaves out those that began elsewhere).
So ranks do not trust what they find, but look again until a rank 0 has confirmed them.

torch comes with torchrun and is imported here only, in jobs that need it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import time
import urllib.parse
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from multiring import errors
from multiring.errors import MultiringError, UsageError
from multiring.rendezvous.launch_environment import TORCHRUN_SCHEME, Placement
from multiring.rendezvous.offered_store import offer_store, ranks_text, signed, signed_in
from multiring.settings import Settings
from multiring.store import Store, TcpStore

__all__ = ["TorchStore", "is_meant", "meet"]

# torchrun's store is there before any rank is.
_CONNECT_SECONDS = 30.0
# A look at torchrun's store costs its host little, but thousands of ranks may look.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5
# What is offered may be gone, and its host as well: each try takes twice as long as the last.
_FIRST_TIMEOUT, _LONGEST_TIMEOUT = 0.5, 8.0
_REMEDY = (
    "See the output of every rank and of torchrun on every host; or let ranks meet elsewhere, by "
    "MULTIRING_STORE and MULTIRING_SECRET (docs/clusters.md)"
)


class TorchStore(Protocol):
    """What is needed of torch's TCPStore; any error of it is a RuntimeError."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


def is_meant(placement: Placement) -> bool:
    """Whether the ranks of this job have to `meet`."""
    return placement.store_url.startswith(TORCHRUN_SCHEME)


def meet(
    placement: Placement,
    settings: Settings,
    connect: Callable[[str, int, float], TorchStore] | None = None,
) -> tuple[Placement, Store]:
    """Brings the ranks of a job together. Collective.

    Args:
        placement: This rank's place, with the address of torchrun's store.
        settings: The timeout, the interfaces for the store of ours, and a secret for it; without one, it is
            left in torchrun's store.
        connect: Opens torchrun's store at a host and a port within so many seconds.

    Returns:
        The place with the job's secret and a name that it has not had before, and the store of rank 0.

    Raises:
        UsageError: There is no torch in this Python, or torchrun's store cannot be reached.
        TimeoutError: Ranks are missing after MULTIRING_TIMEOUT seconds; says which.
    """
    offers = _OfferKey(placement, settings, connect or _connect)
    if placement.rank == 0:
        offer, store = _serve(placement, settings, offers)
    else:
        offer, store = _join(placement, settings, offers)
    job = f"{settings.job_id or 'torchrun'}-{offer['job']}"
    return dataclasses.replace(placement, secret=_secret(offer, settings), job_id=job), store


def _connect(host: str, port: int, timeout: float) -> TorchStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store: TorchStore = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
    return store


class _OfferKey:
    """The one key of ours in torchrun's store, under which is what rank 0 offers."""

    def __init__(
        self, placement: Placement, settings: Settings, connect: Callable[[str, int, float], TorchStore]
    ) -> None:
        parts = urllib.parse.urlsplit(placement.store_url)
        self.host, self.port = parts.hostname or "", parts.port or 0
        self.deadline = time.monotonic() + settings.timeout
        self._key = "multiring/" + urllib.parse.unquote(parts.path)
        self._rank = placement.rank
        try:
            self._store = connect(self.host, self.port, min(settings.timeout, _CONNECT_SECONDS))
        except ImportError as error:
            raise UsageError(
                f"rank {placement.rank} of {placement.size}: torchrun has started the job on several hosts, "
                f"whose ranks meet by torch's store, and this Python has no torch ({error}): install it, or "
                "set MULTIRING_STORE and MULTIRING_SECRET, both the same on all ranks (docs/clusters.md)"
            ) from error
        except RuntimeError as error:
            raise self._gone(error) from error

    def __str__(self) -> str:
        return f"torchrun's store at {self.host}:{self.port}"

    def left(self) -> float:
        """Seconds until the ranks have to be together."""
        return max(0.0, self.deadline - time.monotonic())

    def read(self) -> dict[str, Any]:
        """What is offered; empty: nothing yet."""
        try:
            return dict(json.loads(self._store.get(self._key))) if self._store.check([self._key]) else {}
        except RuntimeError as error:
            raise self._gone(error) from error

    def write(self, offer: dict[str, Any]) -> None:
        """Offers it in the place of what has been there."""
        try:
            self._store.set(self._key, json.dumps(offer))
        except RuntimeError as error:
            raise self._gone(error) from error

    def _gone(self, error: RuntimeError) -> UsageError:
        reason = str(error).strip().partition("\n")[0]
        return UsageError(f"rank {self._rank} cannot reach {self}, where the ranks meet: {reason}. {_REMEDY}")


def _secret(offer: dict[str, Any], settings: Settings) -> bytes:
    if settings.secret is None and "secret" not in offer:
        raise UsageError("rank 0 has a MULTIRING_SECRET and this rank has none: set it on all ranks")
    return settings.secret or bytes.fromhex(offer["secret"])


def _rank_key(offer: dict[str, Any], rank: int) -> str:
    """Where a rank writes its number; by the job's name: another job's store may be where ours was."""
    return f"{offer['job']}/ranks/{rank}"


def _confirmed_key(offer: dict[str, Any]) -> str:
    return f"{offer['job']}/confirmed"


def _serve(placement: Placement, settings: Settings, offers: _OfferKey) -> tuple[dict[str, Any], Store]:
    """Rank 0's part: offers a store, waits for the number of every rank there and confirms them."""
    offer = offer_store(settings.interfaces, settings.secret)
    here, port = offer["addresses"][-1]
    if not settings.interfaces:  # the way to torchrun's store is there for all
        offer["addresses"].insert(0, (offers.host, port))
    store = TcpStore(here, port, _secret(offer, settings), max(offers.left(), _FIRST_TIMEOUT))
    with contextlib.ExitStack() as stack:
        stack.enter_context(store)
        offers.write(
            {name: value for name, value in offer.items() if name != "secret" or not settings.secret}
        )
        entries = [_rank_key(offer, rank) for rank in range(1, placement.size)]

        def read(entry: str, until: float) -> str | None:
            return signed(store, entry, max(0.0, until - time.monotonic()))

        at = f"multiring.init() at port {port}, which they find by {offers},"
        came = signed_in(entries, read, time.monotonic() + offers.left(), settings.stall_warning, at)
        if missing := [rank for rank, number in enumerate(came, 1) if number is None]:
            raise errors.TimeoutError(
                f"rank 0 of {placement.size} waits for {ranks_text(missing)}, which should have found its "
                f"store at port {port} by {offers} within {settings.timeout:g} s: they have not called "
                f"multiring.init(), or cannot connect to that port (MULTIRING_INTERFACES chooses the "
                f"addresses). {_REMEDY}",
                rank=0,
                elapsed=settings.timeout,
            )
        # Once more: the first ranks may have been restarted while the last were awaited.
        present = [signed(store, entry, 0.0) for entry in entries]
        store.set(_confirmed_key(offer), json.dumps(present).encode())
        stack.pop_all()
        return offer, store


def _join(placement: Placement, settings: Settings, offers: _OfferKey) -> tuple[dict[str, Any], Store]:
    """The others' part: writes a number wherever rank 0 offers a store, until it is confirmed."""
    number = secrets.token_hex(8)
    why = "it has not said where: it has not called multiring.init(), or is not running"
    pause, timeout = _FIRST_PAUSE, _FIRST_TIMEOUT
    while offers.left() > 0:
        if offer := offers.read():
            secret = _secret(offer, settings)
            try:
                with contextlib.ExitStack() as stack:
                    store = stack.enter_context(_open(offer, secret, offers, timeout))
                    if _is_confirmed(store, offer, placement.rank, number, offers):
                        stack.pop_all()
                        return offer, store
                why = "the one that it has offered is of ranks before a restart, or not all have come there"
            except MultiringError as error:
                why = str(error)
            timeout = min(2 * timeout, _LONGEST_TIMEOUT)
        time.sleep(min(pause, offers.left()))
        pause = min(2 * pause, _LONGEST_PAUSE)
    raise errors.TimeoutError(
        f"rank {placement.rank} of {placement.size} has found no store of rank 0 by {offers} within "
        f"{settings.timeout:g} s: {why}. {_REMEDY}",
        rank=placement.rank,
        peer=0,
        elapsed=settings.timeout,
    )


def _open(offer: dict[str, Any], secret: bytes, offers: _OfferKey, timeout: float) -> Store:
    failures = []
    for host, port in offer["addresses"]:
        try:
            return TcpStore(host, port, secret, min(timeout, max(offers.left(), 0.1)))
        except MultiringError as error:
            failures.append(str(error))
        if offers.read() != offer:
            break
    raise UsageError("; ".join(failures))


def _is_confirmed(store: Store, offer: dict[str, Any], rank: int, number: str, offers: _OfferKey) -> bool:
    """Writes a number and waits until rank 0 confirms it; False: it confirms others, or offers another."""
    store.set(_rank_key(offer, rank), number.encode())
    while offers.left() > 0 and offers.read() == offer:
        if (
            confirmed := signed(store, _confirmed_key(offer), min(_LONGEST_PAUSE, offers.left()))
        ) is not None:
            return number in json.loads(confirmed)
    return False
