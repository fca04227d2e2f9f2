"""`init_method="multiring://"`: ranks that multiring knows from their launcher meet without any variable of
torch's, under `multiring run`, mpirun and srun."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

import multiring
from multiring import _core, config

__all__ = ["rendezvous"]


def rendezvous(url: str, timeout: timedelta = timedelta(seconds=300), **_: Any) -> Iterator[tuple[Any, ...]]:
    """What torch calls for the URL: a store that rank 0 serves, this rank and the number of ranks.

    Joins the job as `multiring.init()` does. Collective.
    """
    comm = multiring.init()
    store: Any = None
    if comm.rank == 0:
        store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    port = comm.broadcast_object(store.port if store is not None else None)
    addresses = _core.own_addresses(config.load().interfaces) if comm.cross_size > 1 else []
    address = comm.broadcast_object((addresses or ["127.0.0.1"])[0])
    if store is None:
        store = TCPStore(address, port, is_master=False, timeout=timeout)
    yield store, comm.rank, comm.size
    raise RuntimeError("ranks cannot meet again by one rendezvous: call init_process_group again")
