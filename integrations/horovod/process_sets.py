"""Process sets: groups of ranks that operations may be restricted to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from multiring.horovod.operations import Operations

__all__ = ["ProcessSet", "global_process_set"]


class ProcessSet:
    """Some of the ranks, ascending. Registered by `init` or `add_process_set`, which all ranks call alike.

    Attributes:
        ranks: Ranks of the job, ascending; None: those of the global set before `init`.
        process_set_id: Its number, 0 for the global set; None where it is not registered.
        mpi_comm: Always None: sets are not made of MPI's communicators.
    """

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        """Of these ranks.

        Raises:
            ValueError: A rank occurs twice, or is negative.
            NotImplementedError: It is a communicator of mpi4py.
        """
        if not isinstance(ranks_or_comm, Iterable):
            raise NotImplementedError("a ProcessSet is made of a list of ranks here, not of a communicator")
        ranks = sorted(int(rank) for rank in ranks_or_comm)
        if len(set(ranks)) != len(ranks) or (ranks and ranks[0] < 0):
            raise ValueError(f"a process set of ranks {ranks}: expected different ranks of at least 0")
        self.ranks: list[int] | None = ranks
        self.process_set_id: int | None = None
        self.mpi_comm = None
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
        return isinstance(other, ProcessSet) and self.ranks == other.ranks

    def __hash__(self) -> int:
        return hash(tuple(self.ranks or ()))

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__


global_process_set = ProcessSet([])
"""All ranks of the job."""
