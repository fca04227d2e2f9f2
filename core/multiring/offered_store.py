"""A store that rank 0 serves on its host, and what it tells the others of it.

For launchers that serve none of ours but can hand a few words of rank 0 to all ranks.
"""

from __future__ import annotations

import atexit
import functools
import os
import secrets
from collections.abc import Sequence
from typing import Any

from multiring import _core
from multiring.errors import UsageError
from multiring.store import TcpStoreServer

__all__ = ["offer_store"]

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
