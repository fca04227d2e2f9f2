"""Process sets: groups of ranks that operations may be restricted to."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import Any

from multiring.horovod.operations import Operations

__all__ = ["ProcessSet", "global_process_set"]


class ProcessSet:
    """Some of the ranks, ascending. Registered by `init` or `add_process_set`, which all ranks call alike.

    Attributes:
        ranks: Ranks of the job, ascending; None: those of the global set before `init`, and of a set that is
            made of a communicator.
        process_set_id: Its number, 0 for the global set; None where it is not registered.
        mpi_comm: The communicator of mpi4py that it was made of, if it was.
    """

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        """Of these ranks, or of those of a communicator of mpi4py, which `init` looks up.

        Raises:
            ValueError: It is neither; a rank occurs twice, or is negative.
        """
        is_comm = hasattr(ranks_or_comm, "Get_group")
        self.ranks: list[int] | None = None if is_comm else _checked(ranks_or_comm)
        self.process_set_id: int | None = None
        self.mpi_comm: Any = ranks_or_comm if is_comm else None
        self._job_rank = -1
        self._operations: Operations | None = None

    def size(self) -> int | None:
        """Number of ranks; None where the set is not registered."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Rank of this process in the set; None where it is not registered, or this process is not in it."""
        return self._index() if self.included() else None

    def included(self) -> bool:
        """Whether this process is in the set.

        Raises:
            ValueError: The set is not registered.
        """
        if self.process_set_id is None or self.ranks is None:
            raise ValueError(f"{self} is not registered: pass it to hvd.init() or hvd.add_process_set()")
        return self._job_rank in self.ranks

    def operations(self) -> Operations:
        """What runs its operations.

        Raises:
            ValueError: The set is not registered, or this process is not in it.
        """
        if self._operations is None:
            if self is global_process_set:
                raise ValueError("Horovod has not been initialized; use hvd.init().")
            self.included()
            raise ValueError(f"rank {self._job_rank} is not part of {self}, which it uses in an operation")
        return self._operations

    def root(self, root_rank: int) -> int:
        """The rank in the set of a rank of the job.

        Raises:
            ValueError: It is not in the set.
        """
        self.operations()
        assert self.ranks is not None
        if root_rank not in self.ranks:
            raise ValueError(f"root_rank is {root_rank}, which is not part of {self}")
        return self.ranks.index(root_rank)

    def translated(self, job_size: int) -> list[int]:
        """The ranks of the job that its communicator has.

        Raises:
            ValueError: Not all processes of MPI are in the job, so its ranks are others than MPI's.
        """
        group = self.mpi_comm.Get_group()
        world = sys.modules[type(self.mpi_comm).__module__].COMM_WORLD
        if world.Get_size() != job_size:
            raise ValueError(
                f"{self}: the job has {job_size} ranks, and MPI {world.Get_size()} processes; make the "
                "process set of a list of ranks of the job"
            )
        members = range(group.Get_size())
        return sorted(type(group).Translate_ranks(group, list(members), world.Get_group()))

    def register(self, number: int, job_rank: int, operations: Operations | None) -> None:
        """Makes the set usable. Called by `init` and `add_process_set`."""
        self.process_set_id, self._job_rank, self._operations = number, job_rank, operations

    def invalidate(self) -> None:
        """Makes the set unusable, and ends its operations on this rank."""
        if self._operations is not None:
            self._operations.close()
        self.process_set_id = self._operations = None

    def _index(self) -> int:
        assert self.ranks is not None
        return self.ranks.index(self._job_rank)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessSet):
            return False
        return self.ranks == other.ranks and self.mpi_comm is other.mpi_comm

    def __hash__(self) -> int:
        return hash(tuple(self.ranks or ()))

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"
        )

    __repr__ = __str__


def _checked(ranks: Any) -> list[int]:
    """
    Raises:
        ValueError: They are no ranks.
    """
    try:
        found = sorted(operator.index(rank) for rank in ranks)
    except TypeError:
        raise ValueError(
            f"a process set of {ranks!r}: expected a list of process ranks or a communicator of mpi4py"
        ) from None
    if len(set(found)) != len(found) or (found and found[0] < 0):
        raise ValueError(f"a process set of ranks {found}: expected different ranks of at least 0")
    return found


global_process_set = ProcessSet([])
"""All ranks of the job."""
