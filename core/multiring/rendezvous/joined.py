"""What `multiring run` and its ranks tell each other by the store.

Where the ranks are; that they have joined the job; that they have said why it fails.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from multiring.errors import MultiringError
from multiring.store import OTHER_SECRET, open_store

if TYPE_CHECKING:
    from multiring.settings import Settings

__all__ = ["EXPLAINED_KEY", "HOSTS_KEY", "JOINED_KEY", "tell_launcher"]

HOSTS_KEY = "launcher/hosts"  # set by the launcher: what it calls the host of each rank, one line for each
JOINED_KEY = "launcher/joined"
EXPLAINED_KEY = (
    "launcher/explained"  # the program has told the user why it ends with another exit code than 0
)
_SECONDS = 10.0


def tell_launcher(settings: Settings, key: str = JOINED_KEY) -> None:
    """Set a key in the launcher's store, if there is one; `JOINED_KEY` on one rank, once it has joined."""
    if settings.store and settings.secret:
        with contextlib.suppress(MultiringError):  # the job works without it
            url, limit = settings.store, min(settings.timeout, _SECONDS)
            with open_store(url, settings.secret, limit, OTHER_SECRET, settings.timeout) as store:
                store.set(key, b"")
