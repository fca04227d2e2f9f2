"""Where the ranks of a job on several hosts meet that torchrun has started: at the store that torchrun serves
for torch.distributed.

torch comes with torchrun and is imported here only, in jobs that need it.
"""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Callable
from datetime import timedelta

from multiring.errors import UsageError
from multiring.rendezvous.launch_environment import TORCHRUN_SCHEME, Placement
from multiring.rendezvous.offered_store import agree_on_secret
from multiring.settings import Settings
from multiring.store import Store
from multiring.torchrun.store import KeyValueStore, TorchStore

__all__ = ["is_meant", "meet"]

# torchrun's store is there before any rank is.
_CONNECT_SECONDS = 30.0


def is_meant(placement: Placement) -> bool:
    """Whether the ranks of this job have to `meet`."""
    return placement.store_url.startswith(TORCHRUN_SCHEME)


def _connect(host: str, port: int, timeout: float) -> KeyValueStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store: KeyValueStore = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
    return store


def meet(
    placement: Placement,
    settings: Settings,
    connect: Callable[[str, int, float], KeyValueStore] = _connect,
) -> tuple[Placement, Store, str]:
    """Bring the ranks of a job together. Collective.

    Args:
        placement: This rank's place, with the address of torchrun's store.
        settings: The timeout, and a secret; without one, a new one is left in torchrun's store.
        connect: Opens torchrun's store at a host and a port within so many seconds.

    Returns:
        The place with the job's secret and a name that it has not had before, torchrun's store, and how keys
        begin there that nobody has used before.

    Raises:
        UsageError: There is no torch in this Python, torchrun's store cannot be reached, or rank 0 has a
            MULTIRING_SECRET and this rank has none.
        TimeoutError: Ranks are missing after MULTIRING_TIMEOUT seconds; says which.
        PeerLostError: torchrun's store is gone.
    """
    rank, size = placement.rank, placement.size
    parts = urllib.parse.urlsplit(placement.store_url)
    host, port = parts.hostname or "", parts.port or 0
    run = urllib.parse.unquote(parts.path).strip("/")
    try:
        theirs = connect(host, port, min(settings.timeout, _CONNECT_SECONDS))
    except ImportError as error:
        raise UsageError(
            f"rank {rank} of {size}: torchrun has started the job on several hosts, whose ranks meet by "
            f"torch's store, and this Python has no torch ({error}): install it, or set MULTIRING_STORE and "
            "MULTIRING_SECRET, both the same on all ranks (docs/clusters.md)",
            rank=rank,
        ) from error
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"rank {rank} cannot reach torchrun's store at {host}:{port}, where the ranks meet: {reason}. "
            "See the output of torchrun on every host; or let ranks meet elsewhere, by MULTIRING_STORE and "
            "MULTIRING_SECRET (docs/clusters.md)",
            rank=rank,
        ) from error
    store = TorchStore(theirs, f"store of torchrun at {host}:{port}")
    call = "multiring.init()"
    begin = store.meet(
        rank, size, f"multiring/{run}/", settings.timeout, call, warn_after=settings.stall_warning
    )
    secret = agree_on_secret(store, f"{begin}secret", rank, settings)
    name = begin.strip("/").rpartition("/")[2]
    job = f"{settings.job_id or 'torchrun'}-{name}"
    return dataclasses.replace(placement, secret=secret, job_id=job), store, begin
