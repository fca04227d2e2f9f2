"""What `multiring run` and its ranks tell each other by the store.

Where the ranks are; that they have joined the job; that they have said why it fails; that an exception ends
one.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from multiring.errors import MultiringError
from multiring.store import OTHER_SECRET, open_store

if TYPE_CHECKING:
    from multiring.settings import Settings

__all__ = ["EXPLAINED_KEY", "HOSTS_KEY", "JOINED_KEY", "ending_key", "tell_end", "tell_launcher"]

HOSTS_KEY = "launcher/hosts"  # set by the launcher: what it calls the host of each rank, one line for each
JOINED_KEY = "launcher/joined"
EXPLAINED_KEY = (
    "launcher/explained"  # the program has told the user why it ends with another exit code than 0
)
_SECONDS = 10.0
_SECONDS_AT_END = 1.0  # an error is not shown later than this because the launcher is gone


def ending_key(rank: int) -> str:
    """What a rank sets that ends by an uncaught exception, before it shows that."""
    return f"launcher/ending/{rank}"


def tell_launcher(settings: Settings, key: str = JOINED_KEY, seconds: float = _SECONDS) -> None:
    """Set a key in the launcher's store, if there is one that answers within so many seconds; `JOINED_KEY` on
    one rank, once it has joined."""
    if settings.store and settings.secret:
        with contextlib.suppress(MultiringError, OSError):  # the job works without it
            url, limit = settings.store, min(settings.timeout, seconds)
            with open_store(url, settings.secret, limit, OTHER_SECRET, settings.timeout) as store:
                store.set(key, b"")


def tell_end(settings: Settings) -> None:
    """Tell the launcher that an uncaught exception ends this rank, which may take long to exit."""
    if settings.rank is not None:
        tell_launcher(settings, ending_key(settings.rank), _SECONDS_AT_END)
