"""The collectives beside allreduce, by multiring and by the libraries that one could use instead.

In each library the method of a collective takes the arrays of `Buffers` and gives the call that is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from multiring import Communicator
from multiring.benchmarks.collectives.kinds import ROOT, Buffers, Collective
from multiring.benchmarks.contenders import Call, FloatArray, Gloo, Mpi, Ordinary

__all__ = ["Library", "OneCollective", "join_libraries"]


class Library(Protocol):
    """Does all of `COLLECTIVES`; each call returns the result, or fills `out` and returns no array."""

    name: str

    def broadcast(self, x: FloatArray, out: FloatArray) -> Call:
        """The call that gives everybody the root's array, in place."""

    def allgather(self, x: FloatArray, out: FloatArray) -> Call:
        """The call that joins the blocks of all."""

    def reduce_scatter(self, x: FloatArray, out: FloatArray) -> Call:
        """The call that gives this rank its block of the sum."""

    def alltoall(self, x: FloatArray, out: FloatArray) -> Call:
        """The call that sends a block to each."""

    def scatter(self, x: FloatArray, out: FloatArray) -> Call:
        """The call that gives this rank its block of the root's array."""

    def gather(self, x: FloatArray, out: FloatArray) -> Call:
        """The call that joins the blocks of all on the root."""

    def close(self) -> None:
        """Ends the library's part, where it needs that."""


class MultiringCollectives(Ordinary):
    """multiring. Alltoall, scatter and gather return a new array in every call."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self._root = comm.rank == ROOT

    def broadcast(self, x: FloatArray, out: FloatArray) -> Call:
        return partial(self._comm.broadcast, x, ROOT, out)

    def allgather(self, x: FloatArray, out: FloatArray) -> Call:
        return partial(self._comm.allgather, x, out)

    def reduce_scatter(self, x: FloatArray, out: FloatArray) -> Call:
        return partial(self._comm.reduce_scatter, x, "sum", out)

    def alltoall(self, x: FloatArray, out: FloatArray) -> Call:
        return partial(self._comm.alltoall, x)

    def scatter(self, x: FloatArray, out: FloatArray) -> Call:
        return partial(self._comm.scatter, x if self._root else None, ROOT)

    def gather(self, x: FloatArray, out: FloatArray) -> Call:
        return partial(self._comm.gather, x, ROOT)


class GlooCollectives(Gloo):
    """torch.distributed over Gloo, on tensors that share the memory of the arrays."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self._root, self._size = comm.rank == ROOT, comm.size

    def broadcast(self, x: FloatArray, out: FloatArray) -> Call:
        return partial(_of_torch("broadcast"), _tensor(x), ROOT)

    def allgather(self, x: FloatArray, out: FloatArray) -> Call:
        gather = _of_torch("all_gather_single", "all_gather_into_tensor")
        return partial(gather, _tensor(out), _tensor(x))

    def reduce_scatter(self, x: FloatArray, out: FloatArray) -> Call:
        reduce = _of_torch("reduce_scatter_single", "reduce_scatter_tensor")
        return partial(reduce, _tensor(out), _tensor(x))

    def alltoall(self, x: FloatArray, out: FloatArray) -> Call:
        return partial(_of_torch("all_to_all_single"), _tensor(out), _tensor(x))

    def scatter(self, x: FloatArray, out: FloatArray) -> Call:
        return partial(_of_torch("scatter"), _tensor(out), self._blocks(x), ROOT)

    def gather(self, x: FloatArray, out: FloatArray) -> Call:
        return partial(_of_torch("gather"), _tensor(x), self._blocks(out), ROOT)

    def _blocks(self, x: FloatArray) -> list[Any] | None:
        return list(_tensor(x).chunk(self._size)) if self._root else None


def _tensor(x: FloatArray) -> Any:
    import torch

    return torch.from_numpy(x)


def _of_torch(*names: str) -> Any:
    """The function of torch.distributed; of several names the first that this version has."""
    from torch import distributed

    return next(getattr(distributed, name) for name in names if hasattr(distributed, name))


class MpiCollectives(Mpi):
    """The MPI library that mpi4py finds."""

    def broadcast(self, x: FloatArray, out: FloatArray) -> Call:
        return partial(self._world.Bcast, _floats(x), ROOT)

    def allgather(self, x: FloatArray, out: FloatArray) -> Call:
        return partial(self._world.Allgather, _floats(x), _floats(out))

    def reduce_scatter(self, x: FloatArray, out: FloatArray) -> Call:
        from mpi4py import MPI

        return partial(self._world.Reduce_scatter_block, _floats(x), _floats(out), MPI.SUM)

    def alltoall(self, x: FloatArray, out: FloatArray) -> Call:
        return partial(self._world.Alltoall, _floats(x), _floats(out))

    def scatter(self, x: FloatArray, out: FloatArray) -> Call:
        return partial(self._world.Scatter, _floats(x), _floats(out), ROOT)

    def gather(self, x: FloatArray, out: FloatArray) -> Call:
        return partial(self._world.Gather, _floats(x), _floats(out), ROOT)


def _floats(x: FloatArray) -> Any:
    """What MPI takes for an array, and for one that this rank does not have."""
    from mpi4py import MPI

    return [x, MPI.FLOAT] if x.size else None


_PEERS: dict[str, type[GlooCollectives] | type[MpiCollectives]] = {
    "gloo": GlooCollectives,
    "mpi": MpiCollectives,
}


def join_libraries(comm: Communicator, peers: Sequence[str]) -> list[Library]:
    """multiring and the peers, named as in `contenders.PEERS`, in the order of the table. Collective."""
    return [MultiringCollectives(comm), *(_PEERS[name](comm) for name in peers)]


class OneCollective:
    """One of a library's collectives; a `Contender`."""

    exact = True

    def __init__(self, comm: Communicator, library: Library, collective: Collective) -> None:
        self.name = library.name
        self._rank, self._ranks = comm.rank, comm.size
        self._library, self._collective = library, collective

    def prepare(self, count: int) -> tuple[Buffers, Call]:
        """The arrays, of blocks of `count` elements, and the call."""
        buffers = Buffers.of(self._collective, self._rank, self._ranks, count)
        call: Call = getattr(self._library, self._collective.name)(buffers.x, buffers.out)
        return buffers, call

    def close(self) -> None:
        """Nothing: the library has other collectives to do."""
