"""Lets ChainerMN run without MPI.

ChainerMN works on any `CommunicatorBase`, with one exception: to choose a backend, its synchronised batch
normalisation asks whether the communicator is a `PureNcclCommunicator`, and the module of that class imports
mpi4py, which initialises MPI. A process that was not started by `mpirun` need not have MPI at all. So unless
that module is loaded already, a stand-in takes its place that answers the question, and that loads the real
module as soon as anything else of it is asked for (a PureNcclCommunicator to be made, for example).

The other modules that import mpi4py, those of ChainerMN's own communicators, are loaded only when one of them
is made.

Programs also call methods of `comm.mpi_comm`, mostly to wait for each other or to exchange objects. For these
there is `ObjectCommunicator`, with mpi4py's names and rules, over the core.
"""

from __future__ import annotations

import functools
import importlib.util
import operator
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

from multiring import Communicator
from multiring.chainer.messages import Mailbox
from multiring.errors import UsageError
from multiring.objects import not_pickled, pickled, unpickled

__all__ = ["ObjectCommunicator", "keep_mpi_out"]

_MODULE = "chainermn.communicators.pure_nccl_communicator"
_CLASS = "PureNcclCommunicator"


class _StandInClass(type):
    """Type of the stand-in for the class: nothing is an instance until the real class is loaded."""

    def __instancecheck__(cls, instance: object) -> bool:
        module = sys.modules[_MODULE]
        real = vars(module).get("_real")
        return real is not None and isinstance(instance, getattr(real, _CLASS))

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return getattr(_load(), _CLASS)(*args, **kwargs)


class _StandIn(ModuleType):
    """The stand-in for the module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_load(), name)


def keep_mpi_out() -> None:
    """Put the stand-in in place unless the real module is loaded. May be called again."""
    if _MODULE in sys.modules:
        return
    spec = importlib.util.find_spec(_MODULE)
    module = _StandIn(_MODULE)
    module.__spec__ = spec
    setattr(module, _CLASS, _StandInClass(_CLASS, (), {"__module__": _MODULE}))
    sys.modules[_MODULE] = module


def _load() -> ModuleType:
    stand_in = sys.modules[_MODULE]
    real = vars(stand_in).get("_real")
    if real is None:
        spec = stand_in.__spec__
        assert spec is not None
        assert spec.loader is not None
        real = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(real)
        vars(stand_in)["_real"] = real
    found: ModuleType = real
    return found


class ObjectCommunicator:
    """mpi4py's methods for Python objects, which have lower-case names, and its barrier.

    Objects have to be picklable. What one rank cannot pickle is an error on every rank that gets objects.

    Attributes:
        rank: Rank of this process.
        size: Number of ranks.
    """

    def __init__(self, comm: Communicator, mailbox: Mailbox) -> None:
        self._comm = comm
        self._mailbox = mailbox
        self.rank, self.size = comm.rank, comm.size

    def Get_rank(self) -> int:  # noqa: N802 (the name is mpi4py's, here and below)
        """Rank of this process."""
        return self.rank

    def Get_size(self) -> int:  # noqa: N802
        """Number of ranks."""
        return self.size

    def Barrier(self) -> None:  # noqa: N802
        """Wait until all ranks are here."""
        self._comm.barrier()

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._comm.barrier()

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """The object of `root`, on every rank; what others pass is ignored."""
        return self._comm.broadcast_object(obj, root)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """The objects of all ranks on `root`, None elsewhere."""
        data, failure = pickled(sendobj)
        lengths = self._comm.gather(np.array([data.size]), root, name="chainer gather_obj lengths")
        joined = self._comm.gather(data, root, name="chainer gather_obj")
        if failure is not None:
            raise failure
        return None if lengths is None else unpickled(self._comm, "gather of objects", joined, lengths)

    def allgather(self, sendobj: Any) -> list[Any]:
        """The objects of all ranks, on every rank."""
        return self._comm.allgather_object(sendobj)

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Object i of `root`'s sequence on rank i; what others pass is ignored."""
        parts: list[Any] = [np.empty(0, np.uint8)] * self.size
        failure = None
        if self.rank == root:
            parts, failure = self._parts("scatter", sendobj)
        return self._exchange("scatter", parts, failure)[root]

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Send object i to rank i; what all ranks have sent, in the order of the ranks."""
        return self._exchange("alltoall", *self._parts("alltoall", sendobj))

    def reduce(self, sendobj: Any, op: Callable[[Any, Any], Any] = operator.add, root: int = 0) -> Any:
        """The objects of all ranks joined by `op`, in the order of the ranks, on `root`; None elsewhere."""
        found = self.gather(sendobj, root)
        return None if found is None else functools.reduce(op, found)

    def allreduce(self, sendobj: Any, op: Callable[[Any, Any], Any] = operator.add) -> Any:
        """The objects of all ranks joined by `op`, in the order of the ranks, on every rank.

        Args:
            sendobj: This rank's object.
            op: Any function of two objects, such as `max`, or an operation of mpi4py; the sum if left out.
        """
        return functools.reduce(op, self.allgather(sendobj))

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object to rank `dest`, which has to call `recv`, of this object or of the communicator."""
        self._mailbox.send_object(obj, dest, tag)

    ssend = send

    def recv(self, buf: Any = None, source: int = -1, tag: int = -1, status: Any = None) -> Any:
        """Receive the object that rank `source`, which has to be named, has sent with `tag` (with any tag if
        it is negative). `status` is filled; `buf` has no use."""
        return self._mailbox.receive_object(source, None if tag < 0 else tag, status)

    def Split(self, color: int = 0, key: int = 0) -> ObjectCommunicator | None:  # noqa: N802
        """One communicator for each color; None where it is negative, as `MPI.UNDEFINED` is. Collective."""
        child = self._comm.split(None if color < 0 else color, key)
        return None if child is None else ObjectCommunicator(child, Mailbox(child))

    def Dup(self, info: Any = None) -> ObjectCommunicator:  # noqa: N802
        """Another communicator of the same ranks; `info` has no use. Collective."""
        child = self._comm.split(0, self.rank)
        assert child is not None
        return ObjectCommunicator(child, Mailbox(child))

    def Free(self) -> None:  # noqa: N802
        """Close the communicator."""
        self._comm.close()

    def Abort(self, errorcode: int = 0) -> NoReturn:  # noqa: N802
        """End this process at once, with this exit code or 1, and with it the job."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(errorcode or 1)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"mpi_comm has no {name!r}: it sends objects only (bcast, allreduce and so on, in lower case). "
            "Send arrays by methods of the communicator itself, or pass a communicator of mpi4py: "
            "create_communicator(mpi_comm=MPI.COMM_WORLD), under mpirun"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        raise UsageError("a communicator cannot be pickled or copied; keep it out of what is saved")

    def __deepcopy__(self, memo: dict[int, Any]) -> ObjectCommunicator:
        """A copy of what holds the communicator refers to the same one."""
        return self

    def _parts(self, operation: str, objs: Any) -> tuple[list[Any], Exception | None]:
        """One object for each rank, as bytes."""
        try:
            if len(objs) != self.size:
                raise UsageError(f"rank {self.rank}: {operation} of {len(objs)} objects to {self.size} ranks")
        except (TypeError, UsageError) as error:
            return [not_pickled(error)] * self.size, error
        found = [pickled(obj) for obj in objs]
        return [data for data, _ in found], next((error for _, error in found if error is not None), None)

    def _exchange(self, operation: str, parts: list[Any], failure: Exception | None) -> list[Any]:
        """Send part i to rank i; what all ranks have sent, None for no bytes."""
        splits = [part.size for part in parts]
        joined, lengths = self._comm.alltoall(np.concatenate(parts), splits, name=f"chainer {operation}_obj")
        if failure is not None:
            raise failure
        return unpickled(self._comm, f"{operation} of objects", joined, lengths)
