"""How the ranks of a process group find each other: by the store that torch.distributed gives to the group.

Any store of torch does (TCPStore, FileStore, HashStore), so it does not matter who has started the ranks. The
secret by which they know each other's connections is left there too: who can read the store can join.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch.distributed import distributed_c10d

from multiring import config
from multiring.communicator import Communicator
from multiring.console.traceback_hook import install_hook
from multiring.errors import MultiringError, PeerLostError, UsageError
from multiring.initialization import begin_job
from multiring.log import configure_log
from multiring.rendezvous.connect import connect_members
from multiring.rendezvous.joined import tell_end
from multiring.rendezvous.offered_store import Party, agree_on_secret, meet
from multiring.settings import Settings
from multiring.store import Interrupt, Store
from multiring.store.base import check_key, check_value, no_such_key
from multiring.torch_distributed.gloo_name import gloo_is_ours, use_interfaces_of_gloo

__all__ = ["GroupStore", "TorchStore", "connect_group"]

# A look at torch's store costs its host little, but thousands of ranks may look.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05
_ONE_GROUP_A_CALL = (
    "all ranks have to call new_group() with the same ranks, in the same order; pass "
    "use_local_synchronization=True to make groups of different ranks in one place"
)


class TorchStore(Protocol):
    """What is needed of a store of torch; any error of it is a RuntimeError."""

    def set(self, key: str, value: Any) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class GroupStore(Store):
    """A store of torch as one of ours.

    Args:
        store: It.
        prefix: How the keys begin there.
        watch: Called while a key is awaited; raises what ends the wait.
    """

    def __init__(self, store: TorchStore, prefix: str = "", watch: Interrupt | None = None) -> None:
        self._store = store
        self._prefix = prefix
        self._watch = watch

    def __str__(self) -> str:
        return f"store of the process group, a torch {type(self._store).__name__}"

    def set(self, key: str, value: bytes, interrupt: Interrupt | None = None) -> None:
        check_key(key)
        check_value(key, value)
        try:
            self._store.set(self._prefix + key, value)
        except RuntimeError as error:
            raise self._gone(error) from error

    def get(self, key: str, timeout: float, interrupt: Interrupt | None = None) -> bytes:
        # Asked again and again: a store of torch that waits for a key answers no other thread meanwhile.
        check_key(key)
        key, deadline, pause = self._prefix + key, time.monotonic() + timeout, _FIRST_PAUSE
        try:
            while not self._store.check([key]):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise no_such_key(key, str(self), timeout)
                for call in (interrupt, self._watch):
                    if call is not None:
                        call()
                time.sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE)
            return bytes(self._store.get(key))
        except RuntimeError as error:
            raise self._gone(error) from error

    def _gone(self, error: RuntimeError) -> PeerLostError:
        reason = str(error).strip().partition("\n")[0]
        return PeerLostError(
            f"the {self} is gone, or cannot be reached: {reason}. The process that serves it (rank 0, or "
            "torchrun) may have ended: look at its output"
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
    store, prefix = _meet(given, settings, watch)
    try:
        secret = agree_on_secret(store, f"{prefix}secret", rank, settings)
        members = GroupStore(given.store, prefix, watch)
        core = connect_members(members, rank, size, settings, job=f"torch {given.group_id}", secret=secret)
    except MultiringError as error:
        error.args = (f"process group {given.group_id!r}: {error}",)
        raise
    joined = Communicator(core)
    if is_world:
        install_hook(settings.traceback, partial(tell_end, settings))  # before torch's, which calls it
        begin_job(joined, settings)
    return joined


def _meet(given: Any, settings: Settings, watch: Interrupt | None) -> tuple[Store, str]:
    """The store, and how keys begin that belong to this meeting: torch's outlives process groups, and later
    ones have the same names."""
    rank, size = given.group_rank, given.group_size
    if size == 1:
        return GroupStore(given.store), ""
    call = "torch.distributed.init_process_group() or new_group()"
    if gloo_is_ours():  # a rank without it has made a group of Gloo, which waits for others of Gloo
        call += f" with {config.AS_GLOO}=1"
    members = ", ".join(map(str, given.global_ranks_in_group))
    return meet(
        *(rank, size, "multiring/", settings.timeout, _opener(given.store, watch), call),
        Party(f"the group of ranks {members}" if members else "", _ONE_GROUP_A_CALL),
        settings.stall_warning,
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


def _opener(store: TorchStore, watch: Interrupt | None) -> Callable[[float], Store]:
    opened: list[GroupStore] = []

    def reopen(_: float) -> Store:
        if opened:  # torch has opened it, and it is gone
            if watch is not None:
                watch()
            raise PeerLostError(f"the {opened[0]} is gone: look at the output of rank 0, or of torchrun")
        opened.append(GroupStore(store, watch=watch))
        return opened[0]

    return reopen
