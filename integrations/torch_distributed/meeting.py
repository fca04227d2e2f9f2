"""How the ranks of a process group find each other: by the store that torch.distributed gives to the group.

Any store of torch does (TCPStore, FileStore, HashStore), so it does not matter who has started the ranks. The
secret by which they know each other's connections is left there too: who can read the store can join.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.distributed import distributed_c10d

from multiring import config
from multiring.communicator import Communicator
from multiring.console.traceback_hook import install_hook
from multiring.errors import MultiringError, UsageError
from multiring.initialization import begin_job
from multiring.log import configure_log
from multiring.rendezvous.connect import connect_members
from multiring.rendezvous.joined import tell_end
from multiring.rendezvous.offered_store import Party, agree_on_secret
from multiring.settings import Settings
from multiring.store import Interrupt
from multiring.torch_distributed.gloo_name import gloo_is_ours, use_interfaces_of_gloo
from multiring.torchrun.store import TorchStore

__all__ = ["connect_group"]

_ONE_GROUP_A_CALL = (
    "all ranks have to call new_group() with the same ranks, in the same order; pass "
    "use_local_synchronization=True to make groups of different ranks in one place"
)


def connect_group(given: Any) -> Communicator:
    """Connects the ranks of a process group. Collective over them.

    Args:
        given: What torch gives to the creator of a backend (`_DistributedBackendOptions`): `store`,
            `group_rank`, `group_size`, `timeout`, `group_id` and `global_ranks_in_group`.

    Raises:
        UsageError: A setting of multiring is wrong.
        TimeoutError: Ranks are missing after the group's timeout.
        PeerLostError: The store is gone.
    """
    rank, size = given.group_rank, given.group_size
    is_world = not given.global_ranks_in_group
    settings = config.load()
    settings.timeout = given.timeout.total_seconds()
    use_interfaces_of_gloo(settings)
    if settings.transport == "mpi":
        raise UsageError(
            "MULTIRING_TRANSPORT=mpi: process groups of torch.distributed go over TCP between hosts; unset it"
        )
    if not is_world:  # both are for all ranks of the job
        settings.mode = settings.tuning = ""
    configure_log(settings.log_level)
    if is_world:
        install_hook(settings.traceback)
    watch = None if is_world else _member_watch(given)
    store = _store(given, _meet(given, settings, watch), watch)
    try:
        secret = agree_on_secret(store, "secret", rank, settings)
        core = connect_members(store, rank, size, settings, job=f"torch {given.group_id}", secret=secret)
    except MultiringError as error:
        error.args = (f"process group {given.group_id!r}: {error}",)
        raise
    joined = Communicator(core)
    if is_world:
        install_hook(settings.traceback, partial(tell_end, settings))  # before torch's, which calls it
        begin_job(joined, settings)
    return joined


def _store(given: Any, prefix: str, watch: Interrupt | None) -> TorchStore:
    name = f"store of the process group, a torch {type(given.store).__name__}"
    return TorchStore(given.store, name, prefix, watch)


def _meet(given: Any, settings: Settings, watch: Interrupt | None) -> str:
    """Return how keys begin that belong to this meeting: torch's store outlives process groups, and later
    ones have the same names."""
    rank, size = given.group_rank, given.group_size
    if size == 1:
        return ""
    call = "torch.distributed.init_process_group() or new_group()"
    if gloo_is_ours():  # a rank without it has made a group of Gloo, which waits for others of Gloo
        call += f" with {config.AS_GLOO}=1"
    members = ", ".join(map(str, given.global_ranks_in_group))
    party = Party(f"the group of ranks {members}" if members else "", _ONE_GROUP_A_CALL)
    return _store(given, "", watch).meet(
        rank, size, "multiring/", settings.timeout, call, party, settings.stall_warning
    )


def _member_watch(given: Any) -> Interrupt | None:
    """Return what raises PeerLostError if a member of the new group is known to have ended, by the default
    group; None: that is another backend's."""
    comm = getattr(distributed_c10d.GroupMember.WORLD, "comm", None)
    if not isinstance(comm, Communicator):
        return None
    members = set(given.global_ranks_in_group)

    def watch() -> None:
        lost = comm._core.lost_rank()
        if lost is not None and lost.peer in members:
            lost.args = (f"process group {given.group_id!r} cannot be made: {lost}",)
            raise lost

    return watch
