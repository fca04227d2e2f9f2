"""Joining the job, and what every face of Horovod's API has: ranks, what is built in, process sets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import multiring
from multiring import Communicator
from multiring.horovod import timeline
from multiring.horovod.joining import Zeros
from multiring.horovod.operations import Operations
from multiring.horovod.process_sets import ProcessSet, global_process_set
from multiring.horovod.request import Request
from multiring.horovod.submissions import start_barrier
from multiring.state.check import agreed_interval

__all__ = [
    "add_process_set",
    "after",
    "ccl_built",
    "check_every",
    "communicator",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_of",
    "process_set_of_ranks",
    "process_sets",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "use_zeros",
]

_DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"


class _Job:
    """What there is between init and shutdown."""

    def __init__(self, comm: Communicator, is_ours: bool) -> None:
        self.comm = comm
        self.is_ours = is_ours  # and not the world of a program that calls multiring.init() itself
        self.is_homogeneous = len(set(comm.allgather_object(comm.local_size, name="horovod init"))) == 1
        self.check_every = agreed_interval(comm)
        self.is_dynamic = os.environ.get(_DYNAMIC, "") in ("1", "true")
        self.sets: dict[int, ProcessSet] = {}
        self.next_id = 0
        ranks = list(range(comm.size))
        global_process_set.ranks = ranks
        self.add(global_process_set)

    def add_all(self, process_set: ProcessSet) -> None:
        """Registers a set; those of communicators, which are not the same on all ranks, with all of theirs.
        Collective over all ranks."""
        if process_set.mpi_comm is None:
            self.add(process_set)
            return
        own = process_set.ranks = process_set.translated(self.comm.size)
        for ranks in sorted(set(map(tuple, self.comm.allgather_object(own, name="horovod process set")))):
            self.add(process_set if list(ranks) == own else ProcessSet(ranks))

    def meet(self, what: str) -> None:
        """Returns when all ranks have come, which meanwhile take part in what others wait for."""
        operations = self.sets[0].operations()
        request = Request("barrier", what)
        operations.wait(operations.submit(request, start_barrier(request)))

    def add(self, process_set: ProcessSet) -> None:
        """Registers a set. Collective over all ranks."""
        ranks = process_set.ranks or []
        if not ranks or ranks[-1] >= self.comm.size:
            raise ValueError(f"{process_set}: expected ranks from 0 to {self.comm.size - 1}")
        known = next((other for other in self.sets.values() if other.ranks == ranks), None)
        if known is not None:
            raise ValueError(f"{process_set}: these ranks have a process set already, {known}")
        number, self.next_id = self.next_id, self.next_id + 1
        world = self.sets[0].operations() if number else None

        def make() -> Operations | None:
            comm = self.comm.process_set(ranks) if number else self.comm
            title = f"horovod.{number}" if number else "horovod"
            return None if comm is None else Operations(comm, title, world)

        operations: Operations | None = make() if world is None else world.meanwhile(make)
        if operations is not None and _zeros is not None:
            operations.joining.zeros = _zeros
        process_set.register(number, self.comm.rank, operations)
        self.sets[number] = process_set


_job: _Job | None = None
_zeros: Zeros | None = None
_after: dict[str, list[Callable[[], object]]] = {"init": [], "shutdown": []}


def use_zeros(zeros: Zeros) -> None:
    """Has ranks that have joined make their tensors by this function; for frameworks with dtypes that NumPy
    does not have."""
    global _zeros
    _zeros = zeros


def after(moment: str, call: Callable[[], object]) -> None:
    """Have `init` or `shutdown` call a function when it is done. `moment`: "init" or "shutdown"."""
    _after[moment].append(call)


def communicator() -> Communicator | None:
    """The ranks of the job, between `init` and `shutdown`."""
    return None if _job is None else _job.comm


def check_every() -> int:
    """Return the steps between two checks that ranks have the same state, as `init` has agreed; 0: never."""
    return _current().check_every


def _current() -> _Job:
    if _job is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _job


def init(comm: Sequence[int] | Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Joins the job. Collective; does nothing where that has happened.

    Args:
        comm: Ranks of the job that train together, this one among them (ranks that pass different lists
            train apart), or a communicator of mpi4py. All ranks if None.
        process_sets: Process sets to register, or "dynamic" to allow `add_process_set`.

    Raises:
        ValueError: Two process sets have the same ranks, or one has ranks that are not there; `comm` has not
            this rank.
    """
    global _job
    if _job is not None:
        return
    is_ours = not multiring.is_initialized()
    is_list = isinstance(comm, list | tuple | range)
    world = multiring.init(None if is_list else comm)
    job = None
    try:
        job = _Job(_part(world, list(comm)) if is_list and len(comm) else world, is_ours)
        if isinstance(process_sets, str):
            if process_sets.lower() != "dynamic":
                raise ValueError(f"process_sets is {process_sets!r}; expected 'dynamic' or a list")
            job.is_dynamic = True
        else:
            for process_set in process_sets or ():
                job.add_all(process_set)
    except BaseException:
        _leave(job, is_ours)
        raise
    if multiring.rank() == 0:
        timeline.start_by_environment()
    _job = job
    for call in _after["init"]:
        call()


def _part(world: Communicator, ranks: Sequence[int]) -> Communicator:
    """Those of the ranks that give the same list."""
    inside = world.rank in ranks and len(set(ranks)) == len(ranks)
    part = world.split(min(ranks) if inside else None, ranks.index(world.rank) if inside else 0)
    if part is None:
        raise ValueError(f"init(comm={list(ranks)}): expected different ranks, with {world.rank} among them")
    return part


def shutdown() -> None:
    """Leaves the job, whatever is pending. `init` may be called again afterwards, by all ranks."""
    global _job
    job, _job = _job, None
    if job is not None:
        timeline.stop()
        _leave(job, job.is_ours)
        for call in _after["shutdown"]:
            call()


def _leave(job: _Job | None, is_ours: bool) -> None:
    for process_set in () if job is None else job.sets.values():
        process_set.invalidate()
    global_process_set.ranks = []
    if is_ours:
        multiring.shutdown()


def is_initialized() -> bool:
    """Whether `init` has been called and `shutdown` has not."""
    return _job is not None


def size() -> int:
    """Number of ranks. Like all of these functions it raises ValueError before `init`."""
    return _current().comm.size


def rank() -> int:
    """Rank of this process."""
    return _current().comm.rank


def local_size() -> int:
    """Number of ranks on this host."""
    return _current().comm.local_size


def local_rank() -> int:
    """Rank of this process among those of its host."""
    return _current().comm.local_rank


def cross_size() -> int:
    """Number of hosts."""
    return _current().comm.cross_size


def cross_rank() -> int:
    """Number of this host."""
    return _current().comm.cross_rank


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of ranks."""
    return _current().is_homogeneous


def mpi_threads_supported() -> bool:
    """Always raises ValueError: Horovod's MPI is not enabled."""
    _current()
    raise ValueError("Horovod MPI is not enabled; the ranks' bytes are carried by multiring.")


def mpi_enabled() -> bool:
    """Whether Horovod's MPI is in use: False."""
    return False


def mpi_built() -> bool:
    """Whether Horovod's MPI is built in: False."""
    return False


def gloo_enabled() -> bool:
    """Whether Gloo is in use: False."""
    return False


def gloo_built() -> bool:
    """Whether Gloo is built in: False."""
    return False


def nccl_built() -> int:
    """Number of the NCCL release that is built in: 0, for there is none."""
    return 0


def ddl_built() -> bool:
    """Whether IBM's DDL is built in: False."""
    return False


def ccl_built() -> bool:
    """Whether Intel's oneCCL is built in: False."""
    return False


def cuda_built() -> bool:
    """Whether CUDA is built in: False."""
    return False


def rocm_built() -> bool:
    """Whether ROCm is built in: False."""
    return False


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Writes from now on what becomes of operations, as a trace for chrome://tracing or Perfetto; so does
    HOROVOD_TIMELINE from `init` on. Rank 0 writes it.

    A timeline that is being written ends, unless it is the same file.

    Args:
        file_path: The file; what is there is overwritten.
        mark_cycles: Whether negotiations that found operations of all ranks are marked.

    Raises:
        ValueError: Before `init`.
        OSError: The file cannot be written.
    """
    _current()
    if multiring.rank() == 0:
        timeline.start(file_path, mark_cycles)


def stop_timeline() -> None:
    """Ends the timeline, if there is one. Operations that are in progress are not in it; ValueError before
    `init`."""
    _current()
    timeline.stop()


def process_set_of(process_set_id: int) -> ProcessSet:
    """The registered process set of this number.

    Raises:
        ValueError: There is none.
    """
    if process_set_id == 0:
        return global_process_set
    sets = _current().sets
    if process_set_id not in sets:
        raise ValueError(f"there is no process set {process_set_id}, but {sorted(sets)}")
    return sets[process_set_id]


def process_set_of_ranks(ranks: Iterable[int]) -> ProcessSet:
    """The registered process set of these ranks of the job.

    Raises:
        ValueError: There is none.
    """
    wanted = sorted(ranks)
    for process_set in process_sets():
        if process_set.ranks == wanted:
            return process_set
    raise ValueError(
        f"no process set of ranks {wanted} is registered: pass hvd.ProcessSet({wanted}) to hvd.init() or "
        "hvd.add_process_set()"
    )


def process_sets() -> list[ProcessSet]:
    """The registered process sets, in the order of their numbers."""
    return [each for _, each in sorted(_current().sets.items())]


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Registers a process set. Collective over all ranks of the job, those outside of the set included.

    Raises:
        ValueError: HOROVOD_DYNAMIC_PROCESS_SETS=1 is not set, these ranks have a set already, or there are no
            such ranks.
        NotImplementedError: It is made of a communicator.
    """
    job = _current()
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(list(process_set))
    if not job.is_dynamic:
        raise ValueError(f"Set {_DYNAMIC}=1 to allow adding process sets after Horovod initialization.")
    if process_set.mpi_comm is not None:
        raise NotImplementedError("a process set that is added after init() is made of a list of ranks")
    job.meet("add_process_set")
    job.add(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set; its id is None from then on. Collective over all ranks of the job.

    Returns:
        Whether it was there; the global set cannot be removed.

    Raises:
        ValueError: HOROVOD_DYNAMIC_PROCESS_SETS=1 is not set.
    """
    job = _current()
    if not job.is_dynamic:
        raise ValueError(f"Set {_DYNAMIC}=1 to allow removing process sets after Horovod initialization.")
    number = process_set.process_set_id
    if number is None or number == 0 or job.sets.get(number) is not process_set:
        return False
    job.meet("remove_process_set")  # ranks that are late may still need this one
    del job.sets[number]
    process_set.invalidate()
    return True
