"""The key-value store of JAX's coordinator (`jax.distributed.initialize`), at which processes meet."""

from __future__ import annotations

import time
from typing import Protocol

from multiring.errors import PeerLostError
from multiring.store import Interrupt, Store
from multiring.store.base import check_key, check_value, no_such_key

__all__ = ["CoordinatorClient", "CoordinatorStore"]

# A wait of the coordinator's client cannot be interrupted, so it is asked again and again.
_LOOK_SECONDS = 0.1


class CoordinatorClient(Protocol):
    """The methods of JAX's client of its coordinator that are used here. They raise RuntimeError."""

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None: ...

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes: ...


class CoordinatorStore(Store):
    """The key-value store of JAX's coordinator as a store of ours.

    Args:
        client: JAX's client.
        prefix: How the keys begin there.
    """

    def __init__(self, client: CoordinatorClient, prefix: str) -> None:
        self._client = client
        self._prefix = prefix

    def __str__(self) -> str:
        return "store of JAX's coordinator"

    def set(self, key: str, value: bytes, interrupt: Interrupt | None = None) -> None:
        check_key(key)
        check_value(key, value)
        try:
            self._client.key_value_set_bytes(self._prefix + key, value, allow_overwrite=True)
        except RuntimeError as error:
            raise self._gone(error) from error

    def get(self, key: str, timeout: float, interrupt: Interrupt | None = None) -> bytes:
        check_key(key)
        deadline = time.monotonic() + timeout
        while True:
            left = max(0.001, min(_LOOK_SECONDS, deadline - time.monotonic()))
            try:
                return bytes(
                    self._client.blocking_key_value_get_bytes(self._prefix + key, max(1, int(left * 1000)))
                )
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise self._gone(error) from error
            if time.monotonic() >= deadline:
                raise no_such_key(key, str(self), timeout)
            if interrupt is not None:
                interrupt()

    def _gone(self, error: RuntimeError) -> PeerLostError:
        reason = str(error).strip().partition("\n")[0]
        return PeerLostError(
            f"the {self} is gone, or cannot be reached: {reason}. Process 0, which serves it, may have "
            "ended: look at its output"
        )
