"""What `multiring run` and its ranks tell each other by the store.

Where the ranks are; that they have joined the job; that they have said why it fails; that an exception ends
one.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from multiring.errors import MultiringError
from multiring.store import OTHER_SECRET, open_store

if TYPE_CHECKING:
    from multiring.settings import Settings

__all__ = [
    "EXPLAINED_KEY",
    "HOSTS_KEY",
    "JOINED_KEY",
    "consequence_value",
    "ending_key",
    "tell_end",
    "tell_launcher",
    "tell_start",
]

HOSTS_KEY = "launcher/hosts"  # set by the launcher: what it calls the host of each rank, one line for each
JOINED_KEY = "launcher/joined"
EXPLAINED_KEY = (
    "launcher/explained"  # the program has told the user why it ends with another exit code than 0
)
_SECONDS = 10.0
_SECONDS_AT_END = 1.0  # an error is not shown later than this because the launcher is gone
_GOES_ON, _ENDS = b"", b"ends"
_COMPARED = 200  # bytes of a message


def ending_key(rank: int) -> str:
    """What a rank sets that ends by an uncaught exception, before it shows that: to `consequence_value` where
    that says nothing of its own."""
    return f"launcher/ending/{rank}"


def consequence_value(message: str) -> bytes:
    """What stands for an error that says nothing but that Ctrl-C came or another rank was lost.

    Args:
        message: The line of its traceback that names it.
    """
    return message.encode(errors="replace")[:_COMPARED]


def tell_launcher(
    settings: Settings, key: str = JOINED_KEY, value: bytes = b"", seconds: float = _SECONDS
) -> None:
    """Set a key in the launcher's store, if there is one that answers within so many seconds; `JOINED_KEY` on
    one rank, once it has joined."""
    if settings.store and settings.secret:
        with contextlib.suppress(MultiringError, OSError):  # the job works without it
            url, limit = settings.store, min(settings.timeout, seconds)
            with open_store(url, settings.secret, limit, OTHER_SECRET, settings.timeout) as store:
                store.set(key, value)


def tell_start(settings: Settings) -> None:
    """Tell the launcher that this rank goes on where a program before may have said that it ends: in a shell,
    which the launcher has started."""
    if settings.rank is not None and os.getsid(0) != os.getpid():
        tell_launcher(settings, ending_key(settings.rank), _GOES_ON)


def tell_end(settings: Settings, consequence: str = "") -> None:
    """Tell the launcher that an uncaught exception ends this rank, which may take long to exit.

    Args:
        settings: Of this rank.
        consequence: The line that names the exception, if it says nothing of its own.
    """
    if settings.rank is not None:
        value = consequence_value(consequence) or _ENDS
        tell_launcher(settings, ending_key(settings.rank), value, _SECONDS_AT_END)
