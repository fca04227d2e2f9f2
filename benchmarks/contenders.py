"""What is measured: multiring on two kinds of memory, the limit of the machine, and the libraries that one
could use instead. Each sums float32 arrays over the ranks, in place; `libraries` has what else they do."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from multiring import Communicator, _core
from multiring.errors import UsageError
from multiring.models.peers.gloo import GlooGroup
from multiring.tuning.file import only
from multiring.types import CommDtypeName, OrderName

__all__ = ["PEERS", "Call", "Contender", "Elsewhere", "FloatArray", "make_contenders"]

FloatArray = npt.NDArray[np.float32]
Call = Callable[[], object]
Arrays = TypeVar("Arrays", covariant=True)


class Contender(Protocol[Arrays]):
    """Something that does a collective on arrays of its own, such as to sum one over the ranks.

    Attributes:
        name: In tables and plots.
        exact: Whether the result is the very one, and checked; the limit leaves out the waiting, and so may
            not see all input.
    """

    name: str
    exact: bool

    def prepare(self, count: int) -> tuple[Arrays, Call]:
        """Arrays of `count` elements (in a collective that has blocks: each block), and the call that works
        on them. Collective."""

    def close(self) -> None:
        """Ends the library's part, where it needs that."""
        return


class Elsewhere(ABC):
    """Something that sums arrays over the ranks in processes of its own, which do whole turns.

    Attributes:
        name: In tables and plots.
        exact: As `Contender.exact`.
    """

    name: str
    exact = True

    @abstractmethod
    def prepare(self, count: int) -> None:
        """Has an array of `count` elements ready for each rank. Collective."""

    @abstractmethod
    def iterate(self, first: int, count: int) -> list[tuple[int, int]]:
        """Iterations from the number `first` on; when this rank entered and left each, in nanoseconds.

        Collective. They are made and checked as `measure` does.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the processes. Collective."""


class Ordinary(Contender[FloatArray]):
    """multiring on memory of NumPy's."""

    name = "multiring"
    exact = True

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def array(self, count: int) -> FloatArray:
        """An array of `count` zeros."""
        return np.zeros(count, np.float32)

    def prepare(self, count: int) -> tuple[FloatArray, Call]:
        x, allreduce = self.array(count), self._comm.allreduce
        return x, lambda: allreduce(x, out=x)


class Narrow(Ordinary):
    """The same with elements that cross from host to host in half precision, and so not the very sum."""

    exact = False

    def __init__(self, comm: Communicator, comm_dtype: CommDtypeName) -> None:
        super().__init__(comm)
        self._comm_dtype = comm_dtype
        self.name = f"{Ordinary.name} {comm_dtype}"

    def prepare(self, count: int) -> tuple[FloatArray, Call]:
        x, allreduce, comm_dtype = self.array(count), self._comm.allreduce, self._comm_dtype
        return x, lambda: allreduce(x, out=x, comm_dtype=comm_dtype)


class InMode(Ordinary):
    """The same by plans of another mode, on a communicator of its own."""

    def __init__(self, comm: Communicator, mode: str) -> None:
        own = comm.split(0)
        assert own is not None  # all ranks are in it
        super().__init__(own)
        self._comm._core.set_tuning(only(mode))
        self._order: OrderName = "any" if "r" in mode else "canonical"
        self.name = f"{Ordinary.name} {mode}"

    def prepare(self, count: int) -> tuple[FloatArray, Call]:
        x, allreduce, order = self.array(count), self._comm.allreduce, self._order
        return x, lambda: allreduce(x, out=x, order=order)

    def close(self) -> None:
        self._comm.close()


class Symmetric(Ordinary):
    """multiring on memory that every rank has mapped, as the adapters use it for gradients."""

    name = "multiring symmetric"

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self._array: FloatArray | None = None

    def array(self, count: int) -> FloatArray:
        """A symmetric array of `count` elements; the same one as long as `count` is. Collective."""
        if self._array is None or self._array.size != count:
            self._array = self._comm.symmetric_empty(count)
            self._array.fill(0)
        return self._array


class Limit(Contender[FloatArray]):
    """The same kernel on the same memory without any synchronisation: every rank reads its slice of all
    inputs and writes it to all outputs."""

    name = "limit"
    exact = False

    def __init__(self, comm: Communicator, symmetric: Symmetric) -> None:
        self._comm = comm
        self._symmetric = symmetric

    def prepare(self, count: int) -> tuple[FloatArray, Call]:
        # The very memory of the symmetric contender: which pages an array has can make a difference.
        x = self._symmetric.array(count)
        rank, size = self._comm.rank, self._comm.size
        line = 16  # elements of a cache line
        lines = -(-count // line)
        begin = min(count, lines * rank // size * line)
        end = min(count, lines * (rank + 1) // size * line)
        slices = [self._comm.symmetric_peer(x, peer)[begin:end] for peer in range(size)]
        return x, _core.ArrayReduction(slices, slices, _core.ReduceOp.SUM)


class Gloo(Contender[FloatArray]):
    """torch.distributed over Gloo, on the loopback interface where all ranks are on one host."""

    name = "Gloo"
    exact = True

    def __init__(self, comm: Communicator) -> None:
        self._group = GlooGroup(comm)

    def prepare(self, count: int) -> tuple[FloatArray, Call]:
        import torch
        from torch import distributed

        x = torch.zeros(count)
        all_reduce = distributed.all_reduce
        return x.numpy(), lambda: all_reduce(x)

    def close(self) -> None:
        self._group.close()


class Mpi(Contender[FloatArray]):
    """The MPI library that mpi4py finds."""

    exact = True

    def __init__(self, comm: Communicator) -> None:
        from mpi4py import MPI

        self._world: Any = MPI.COMM_WORLD
        if self._world.Get_size() != comm.size:
            raise UsageError(
                f"MPI sees {self._world.Get_size()} ranks instead of {comm.size}: start the benchmark with "
                "the mpirun of the MPI library that mpi4py finds, or leave MPI out with --peers gloo"
            )
        self.name = MPI.get_vendor()[0]

    def prepare(self, count: int) -> tuple[FloatArray, Call]:
        from mpi4py import MPI

        x = np.zeros(count, np.float32)
        reduce, buffer, in_place, op = self._world.Allreduce, [x, MPI.FLOAT], MPI.IN_PLACE, MPI.SUM
        return x, lambda: reduce(in_place, buffer, op)


PEERS: dict[str, tuple[str, type[Gloo] | type[Mpi]]] = {"gloo": ("torch", Gloo), "mpi": ("mpi4py", Mpi)}
"""For each peer the package it comes in."""


def installed_peers() -> list[str]:
    """The peers whose packages are there."""
    return [name for name, (package, _) in PEERS.items() if importlib.util.find_spec(package) is not None]


def make_contenders(
    comm: Communicator, peers: list[str], comm_dtype: CommDtypeName | None, modes: Sequence[str] = ()
) -> list[Contender[FloatArray]]:
    """All that are measured, in the order of the table."""
    contenders: list[Contender[FloatArray]] = [Ordinary(comm)]
    if comm_dtype is not None:
        contenders.append(Narrow(comm, comm_dtype))
    contenders += [InMode(comm, mode) for mode in modes]
    if comm.cross_size == 1:
        symmetric = Symmetric(comm)
        contenders = [symmetric, *contenders, Limit(comm, symmetric)]
    return contenders + [PEERS[name][1](comm) for name in peers]
