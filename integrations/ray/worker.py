"""One rank in a process of Ray: an actor."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from multiring.store import TcpStoreServer
from ray.util import get_node_ip_address

__all__ = ["Location", "Worker"]


@dataclass(frozen=True)
class Location:
    """Where a worker is.

    Attributes:
        node: Ray's name of the node.
        address: The node's address.
        process: Its process id.
    """

    node: str
    address: str
    process: int


class Worker:
    """What runs in the actor's process."""

    def __init__(self) -> None:
        self._store: TcpStoreServer | None = None

    def location(self) -> Location:
        """Where this is."""
        return Location(ray.get_runtime_context().get_node_id(), get_node_ip_address(), os.getpid())

    def serve(self) -> dict[str, str]:
        """Serves the store of the job as long as this process lives; the variables that lead there."""
        secret = secrets.token_hex(32)
        address = get_node_ip_address()
        self._store = TcpStoreServer(address, 0, bytes.fromhex(secret))
        host = f"[{address}]" if ":" in address else address
        return {"MULTIRING_STORE": f"tcp://{host}:{self._store.port}", "MULTIRING_SECRET": secret}

    def prepare(self, environ: Mapping[str, str]) -> None:
        """Sets the environment, before anything is imported that reads it."""
        os.environ.update(environ)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Calls `fn` as if it were a program of its own: when it has ended, this rank has left the job."""
        try:
            return fn(*args, **kwargs)
        except SystemExit as end:
            if end.code in (None, 0):
                return None
            raise RuntimeError(f"sys.exit({end.code!r})") from end
        finally:
            multiring = sys.modules.get("multiring.initialization")
            if multiring is not None:
                multiring.shutdown()
