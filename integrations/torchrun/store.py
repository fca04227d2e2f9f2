"""A store of torch (TCPStore, FileStore, HashStore) as a store of ours, and how ranks meet there."""

from __future__ import annotations

import time
from typing import Any, Protocol

from multiring.errors import PeerLostError
from multiring.rendezvous import offered_store
from multiring.rendezvous.offered_store import Party
from multiring.store import Interrupt, Store
from multiring.store.foreign import ForeignStore

__all__ = ["KeyValueStore", "TorchStore"]

_UNNAMED = Party()
_SERVER = "The process of rank 0, or torchrun"


class KeyValueStore(Protocol):
    """The methods of torch's stores that are used here. They raise RuntimeError."""

    def set(self, key: str, value: Any) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class TorchStore(ForeignStore):
    """A store of torch as a store of ours.

    Args:
        store: The store of torch.
        name: What it is, for messages.
        prefix: How the keys begin there.
        watch: Called while a key is awaited; raises what ends the wait.
    """

    def __init__(
        self, store: KeyValueStore, name: str, prefix: str = "", watch: Interrupt | None = None
    ) -> None:
        super().__init__(name, _SERVER, prefix, watch)
        self._store = store

    def write(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def look_up(self, key: str, seconds: float) -> bytes | None:
        if self._store.check([key]):
            return bytes(self._store.get(key))
        time.sleep(seconds)
        return None

    def meet(
        self,
        rank: int,
        size: int,
        prefix: str,
        timeout: float,
        call: str,
        party: Party = _UNNAMED,
        warn_after: float = 0.0,
    ) -> str:
        """Bring ranks together that share this store, which outlives ranks and process groups. Collective.

        Args:
            rank: This rank.
            size: Number of ranks.
            prefix: How the keys of this meeting begin.
            timeout: Seconds within which all have to come.
            call: What the ranks call to meet, for messages.
            party: What these ranks are.
            warn_after: Seconds after which a rank says in the log who is missing; 0: it does not.

        Returns:
            How keys begin that nobody has used before.

        Raises:
            TimeoutError: Ranks are missing after `timeout` seconds; says which.
            PeerLostError: The store is gone.
        """
        stores = iter([self])

        def open_once(_: float) -> Store:
            for store in stores:
                return store
            if self.watch is not None:  # the store was lost, and nobody serves another one
                self.watch()
            raise PeerLostError(f"the {self} is gone: look at the output of rank 0, or of torchrun")

        return offered_store.meet(rank, size, prefix, timeout, open_once, call, party, warn_after)[1]
