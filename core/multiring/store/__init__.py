"""Rendezvous stores: where the ranks of a job leave keys for each other.

`FileStore` serves the ranks of one host and needs no process of its own. `TcpStoreServer` with `TcpStore`
serves any ranks that can reach one port. Neither is meant for bulk data.
"""

from __future__ import annotations

import contextlib
import urllib.parse

from multiring.errors import UsageError
from multiring.store.base import MAX_KEY_BYTES, MAX_VALUE_BYTES, Store
from multiring.store.file import FileStore
from multiring.store.tcp import TcpStore, TcpStoreServer

__all__ = [
    "MAX_KEY_BYTES",
    "MAX_VALUE_BYTES",
    "FileStore",
    "Store",
    "TcpStore",
    "TcpStoreServer",
    "open_store",
    "serve_store",
]


def serve_store(url: str, secret: bytes | None) -> TcpStoreServer | None:
    """Serves the store that `url` names, if that is a port of this host on which nobody serves yet.

    For rank 0 of a job whose launcher has no store of its own: any rank then finds it there.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "tcp" or not parts.hostname or not parts.port or secret is None:
        return None
    with contextlib.suppress(UsageError):
        return TcpStoreServer(parts.hostname, parts.port, secret)
    return None  # somebody serves it already, or on another host


def open_store(url: str, secret: bytes | None) -> Store:
    """Opens the store that `url` names: `file:///directory` or `tcp://host:port`.

    Args:
        url: The store; `MULTIRING_STORE` as a launcher sets it.
        secret: The job's secret; a TCP store needs it, a file store is kept safe by its directory's mode.

    Raises:
        UsageError: The URL is not understood, or a TCP store has no secret.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return FileStore(urllib.parse.unquote(parts.path))
    if parts.scheme == "tcp":
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if host and port:
            if secret is None:
                raise UsageError(f"the store {url} needs a secret: set MULTIRING_SECRET on every rank")
            return TcpStore(host, port, secret)
    raise UsageError(f"store {url!r} is not understood: give file:///directory or tcp://host:port")
