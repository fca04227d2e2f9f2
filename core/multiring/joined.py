"""How `multiring run` learns that its ranks have joined the job, and have not run each on its own."""

from __future__ import annotations

import contextlib

from multiring import config
from multiring.errors import MultiringError
from multiring.store import OTHER_SECRET, open_store

__all__ = ["JOINED_KEY", "tell_launcher"]

JOINED_KEY = "launcher/joined"
_SECONDS = 10.0


def tell_launcher(settings: config.Settings) -> None:
    """Set the key in the launcher's store, if there is one. For one rank, after the first initialisation."""
    if settings.store and settings.secret:
        with contextlib.suppress(MultiringError):  # the job works without it
            url, limit = settings.store, min(settings.timeout, _SECONDS)
            with open_store(url, settings.secret, limit, OTHER_SECRET, settings.timeout) as store:
                store.set(JOINED_KEY, b"")
