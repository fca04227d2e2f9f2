"""Rendezvous stores: where the ranks of a job leave keys for each other.

`FileStore` serves the ranks of one host and needs no process of its own. `TcpStoreServer` with `TcpStore`
serves any ranks that can reach one port. Neither is meant for bulk data.
"""

from __future__ import annotations

import ipaddress
import socket
import urllib.parse

from multiring.errors import UsageError
from multiring.store.base import MAX_KEY_BYTES, MAX_VALUE_BYTES, Interrupt, Store
from multiring.store.file import FileStore
from multiring.store.tcp import OTHER_SECRET, TcpStore, TcpStoreServer

__all__ = [
    "MAX_KEY_BYTES",
    "MAX_VALUE_BYTES",
    "OTHER_SECRET",
    "FileStore",
    "Interrupt",
    "Store",
    "TcpStore",
    "TcpStoreServer",
    "address_to_listen_on",
    "open_store",
    "serve_store",
]


def serve_store(url: str, secret: bytes | None) -> TcpStoreServer | None:
    """Serves the store that `url` names; None if that is no port, or there is no secret to keep it by.

    For rank 0 of a job whose launcher has no store of its own: any rank then finds it there.

    Raises:
        UsageError: Somebody serves there already, or it is a port of another host.
    """
    address = _tcp_address(url)
    if address is None or secret is None:
        return None
    host, port = address
    return TcpStoreServer(address_to_listen_on(host), port, secret)


def address_to_listen_on(host: str) -> str:
    """The address of this host that others reach when they call it `host`, a name or an address.

    Many systems give their own name an address that no other host reaches (127.0.1.1): then it is all there
    are of that family.
    """
    if _is_literal(host):
        return host
    try:
        found = [str(address[0]) for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        return host  # and who listens there tells why that cannot be
    address = next((each for each in found if ":" not in each), found[0])
    if host == "localhost" or not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return address
    return "::" if ":" in address else "0.0.0.0"


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _tcp_address(url: str) -> tuple[str, int] | None:
    parts = urllib.parse.urlsplit(url)
    try:
        if parts.scheme == "tcp" and parts.hostname and parts.port:
            return parts.hostname, parts.port
    except ValueError:
        pass
    return None


def open_store(
    url: str,
    secret: bytes | None,
    timeout: float = 30.0,
    refused_because: str = OTHER_SECRET,
    answer_timeout: float | None = 0.0,
) -> Store:
    """Opens the store that `url` names: `file:///directory` or `tcp://host:port`.

    Args:
        url: The store; `MULTIRING_STORE` as a launcher sets it.
        secret: The job's secret; a TCP store needs it, a file store is kept safe by its directory's mode.
        timeout: Seconds within which a TCP store has to be reached.
        refused_because: What it means if a TCP store knows another secret; for the message.
        answer_timeout: Seconds within which a TCP store has to answer, 20 at least; None: any number.

    Raises:
        UsageError: The URL is not understood, or a TCP store has no secret or another one.
        TimeoutError: A TCP store cannot be reached.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return FileStore(urllib.parse.unquote(parts.path))
    if address := _tcp_address(url):
        if secret is None:
            raise UsageError(f"the store {url} needs a secret: set MULTIRING_SECRET on every rank")
        return TcpStore(*address, secret, timeout, refused_because, answer_timeout)
    raise UsageError(f"store {url!r} is not understood: give file:///directory or tcp://host:port")
