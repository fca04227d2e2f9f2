"""The key-value store of JAX's coordinator (`jax.distributed.initialize`), at which processes meet."""

from __future__ import annotations

from typing import Protocol

from multiring.store.foreign import ForeignStore

__all__ = ["CoordinatorClient", "CoordinatorStore"]


class CoordinatorClient(Protocol):
    """The methods of JAX's client of its coordinator that are used here. They raise RuntimeError."""

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None: ...

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes: ...


class CoordinatorStore(ForeignStore):
    """The key-value store of JAX's coordinator as a store of ours.

    Args:
        client: JAX's client.
        prefix: How the keys begin there.
    """

    def __init__(self, client: CoordinatorClient, prefix: str) -> None:
        super().__init__("store of JAX's coordinator", "Process 0", prefix)
        self._client = client

    def write(self, key: str, value: bytes) -> None:
        self._client.key_value_set_bytes(key, value, allow_overwrite=True)

    def look_up(self, key: str, seconds: float) -> bytes | None:
        try:
            return bytes(self._client.blocking_key_value_get_bytes(key, max(1, int(seconds * 1000))))
        except RuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None
