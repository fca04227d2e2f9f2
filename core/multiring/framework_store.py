"""What ranks do that have met at the store of a framework, torch.distributed's or JAX's, to become a job."""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING

from multiring import errors
from multiring.console.start_line import say_start
from multiring.console.traceback_hook import install_hook
from multiring.errors import UsageError
from multiring.rendezvous.joined import tell_end, tell_launcher
from multiring.tuning.costs import learn_costs

if TYPE_CHECKING:
    from multiring.communicator import Communicator
    from multiring.settings import Settings
    from multiring.store import Store

__all__ = ["agree_on_secret", "begin_job"]

_OWN_SECRET = b"own"


def agree_on_secret(store: Store, key: str, rank: int, settings: Settings) -> bytes:
    """Return the secret by which the ranks know each other's connections. Collective.

    Rank 0 makes it and leaves it in the store, unless the user has given one to all ranks. A process that can
    read the store can join.

    Args:
        store: Where the ranks meet.
        key: A key of the store that nothing else uses.
        rank: This rank.
        settings: Of this process.

    Raises:
        UsageError: Rank 0 has MULTIRING_SECRET, and this rank has not.
        TimeoutError: Rank 0 is missing.
    """
    if rank == 0:
        made = settings.secret or secrets.token_bytes(32)
        store.set(key, _OWN_SECRET if settings.secret else made.hex().encode())
        return made
    try:
        found = store.get(key, settings.timeout)
    except errors.TimeoutError as error:
        raise errors.TimeoutError(f"rank {rank} waits for rank 0: {error}", rank=rank, peer=0) from error
    if found != _OWN_SECRET:
        return bytes.fromhex(found.decode())
    if settings.secret is None:
        raise UsageError("rank 0 has a MULTIRING_SECRET and this rank has none: set it on all ranks")
    return settings.secret


def begin_job(world: Communicator, settings: Settings) -> None:
    """Tell the launcher that the ranks have joined, and the user by the line about the start. Collective.

    Args:
        world: All ranks of the job.
        settings: Of this process.
    """
    if world.rank == 0:
        tell_launcher(settings)
    install_hook(settings.traceback, partial(tell_end, settings))  # before the framework's, which calls it
    learn_costs(world, settings)
    if world.rank == 0:
        say_start(world, settings, by_mpi=False)
