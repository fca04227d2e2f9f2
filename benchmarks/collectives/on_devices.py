"""What `multiring bench allreduce --device cuda` measures: arrays on GPUs, by PyTorch's or CuPy's.

An array is copied to the host, added up there and copied back. These three are measured beside what does all,
in the same turns, by the same ranks at once: the slowest is what an allreduce takes at least that passes the
host, since no part can wait for nothing.
"""

from __future__ import annotations

import argparse
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from multiring import Communicator
from multiring.benchmarks.contenders import Call, Contender, Ordinary
from multiring.errors import MultiringError, UsageError
from multiring.models.peers.gloo import GlooGroup

__all__ = ["LIMIT_PARTS", "Field", "choose_peers"]

_NAMES = {"nccl": "NCCL", "gloo": "Gloo"}  # by what torch.distributed calls them


class Library(ABC):
    """Makes arrays on one device, the current one from then on.

    Attributes:
        name: For messages.
    """

    name: str

    @abstractmethod
    def zeros(self, count: int) -> Any:
        """A float32 array on the device."""

    @abstractmethod
    def pinned(self, count: int) -> Any:
        """A float32 array in pinned host memory."""

    @abstractmethod
    def fill(self, x: Any, value: float) -> None:
        """Writes it to all elements. Does not wait."""

    @abstractmethod
    def copy(self, to: Any, x: Any) -> None:
        """Copies between a device and pinned memory. Does not wait."""

    @abstractmethod
    def synchronize(self) -> None:
        """Returns when the device has done what it was given."""

    @abstractmethod
    def device(self) -> tuple[str, str]:
        """The device's name, and what no other device of the host is called."""


class Torch(Library):
    """PyTorch."""

    name = "PyTorch"

    def __init__(self, local_rank: int) -> None:
        self._torch = importlib.import_module("torch")
        self._torch.cuda.set_device(local_rank % self._torch.cuda.device_count())

    def zeros(self, count: int) -> Any:
        return self._torch.zeros(count, device="cuda")

    def pinned(self, count: int) -> Any:
        return self._torch.zeros(count, pin_memory=True)

    def fill(self, x: Any, value: float) -> None:
        x.fill_(value)

    def copy(self, to: Any, x: Any) -> None:
        to.copy_(x, non_blocking=True)

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()

    def device(self) -> tuple[str, str]:
        found = self._torch.cuda.get_device_properties(self._torch.cuda.current_device())
        return found.name, str(getattr(found, "uuid", self._torch.cuda.current_device()))


class Cupy(Library):
    """CuPy."""

    name = "CuPy"

    def __init__(self, local_rank: int) -> None:
        self._cupy, self._cupyx = importlib.import_module("cupy"), importlib.import_module("cupyx")
        self._device = self._cupy.cuda.Device(local_rank % self._cupy.cuda.runtime.getDeviceCount())
        self._device.use()

    def zeros(self, count: int) -> Any:
        return self._cupy.zeros(count, "float32")

    def pinned(self, count: int) -> Any:
        return self._cupyx.zeros_pinned(count, "float32")

    def fill(self, x: Any, value: float) -> None:
        x.fill(value)

    def copy(self, to: Any, x: Any) -> None:
        if isinstance(to, self._cupy.ndarray):
            to.set(x)
        else:
            x.get(out=to, blocking=False)

    def synchronize(self) -> None:
        self._device.synchronize()

    def device(self) -> tuple[str, str]:
        name = self._cupy.cuda.runtime.getDeviceProperties(self._device.id)["name"]
        return name.decode(), self._device.pci_bus_id


def _count(module: str) -> int:
    found = importlib.import_module(module)
    count = found.cuda.device_count() if module == "torch" else found.cuda.runtime.getDeviceCount()
    return int(count)


def find_library() -> Callable[[int], Library]:
    """The library that sees a device, of a local rank: PyTorch, which has NCCL and Gloo, before CuPy.

    Raises:
        UsageError: None does; says of each why.
    """
    reasons = []
    for module, library in (("torch", Torch), ("cupy", Cupy)):
        if find_spec(module) is None:
            reasons.append(f"{library.name} is not installed")
            continue
        try:
            if _count(module) > 0:
                return library
            reasons.append(f"{library.name} sees none")
        except Exception as error:  # each has kinds of its own
            reasons.append(f"{library.name} sees none ({error})")
    why = "; ".join(reasons)
    raise UsageError(f"--device cuda: no device to measure: {why}; `multiring doctor` looks for the driver")


def choose_peers(options: argparse.Namespace) -> list[str]:
    """The peers that are wanted; all there are by default.

    Args:
        options: Those of `multiring bench allreduce`.

    Raises:
        UsageError: Others are wanted, there is no device, or an option is about arrays on the host.
    """
    for name in ("mpich", "tcp_streams", "comm_dtype", "modes"):
        if getattr(options, name):
            raise UsageError(f"--{name.replace('_', '-')} is of arrays on the host: leave it or --device out")
    if "mpi" in (options.peers or ()):
        raise UsageError("--device cuda measures beside NCCL and Gloo: leave mpi out of --peers")
    find_library()
    return list(_NAMES) if options.peers is None else list(options.peers)


class Vector:
    """An array on a device, as tasks see it: complete whenever they have written to it."""

    def __init__(self, library: Library, count: int) -> None:
        self._library, self.array, self.size = library, library.zeros(count), count

    def fill(self, value: float) -> None:
        """Writes it to all elements."""
        self._library.fill(self.array, value)
        self._library.synchronize()

    def __getitem__(self, index: int) -> float:
        return float(self.array[index])


class OnDevice(Contender[Vector]):
    """multiring on the device's arrays."""

    name = Ordinary.name
    exact = True

    def __init__(self, comm: Communicator, library: Library) -> None:
        self._comm, self._library = comm, library

    def prepare(self, count: int) -> tuple[Vector, Call]:
        vector, allreduce = Vector(self._library, count), self._comm.allreduce
        return vector, lambda: allreduce(vector.array, out=vector.array)


class OnHost(Ordinary):
    """The part of it on the host."""

    name = "on the host"


class Copy(Contender[Vector]):
    """The part of it that copies, in one direction, by all ranks at once."""

    exact = False

    def __init__(self, library: Library, *, to_host: bool) -> None:
        self._library, self._to_host = library, to_host
        self.name = "copy to host" if to_host else "copy to device"

    def prepare(self, count: int) -> tuple[Vector, Call]:
        library, vector, host = self._library, Vector(self._library, count), self._library.pinned(count)
        to, source = (host, vector.array) if self._to_host else (vector.array, host)

        def call() -> None:
            library.copy(to, source)
            library.synchronize()

        return vector, call


LIMIT_PARTS = ("copy to host", OnHost.name, "copy to device")
"""The names of the contenders the slowest of which is the limit."""


class OfTorch(Contender[Vector]):
    """torch.distributed over NCCL or Gloo, in a group of the ranks of its default group."""

    exact = True

    def __init__(self, library: Library, backend: str) -> None:
        distributed = importlib.import_module("torch.distributed")
        self._library, self._all_reduce = library, distributed.all_reduce
        self._group = distributed.new_group(backend=backend)
        self.name = _NAMES[backend]

    def prepare(self, count: int) -> tuple[Vector, Call]:
        vector, library = Vector(self._library, count), self._library

        def call() -> None:
            self._all_reduce(vector.array, group=self._group)
            library.synchronize()

        return vector, call


class NcclOfCupy(Contender[Vector]):
    """NCCL, by CuPy's names for it."""

    name = _NAMES["nccl"]
    exact = True

    def __init__(self, comm: Communicator, library: Library, unique: Any) -> None:
        self._nccl = _nccl_of_cupy()
        self._stream = importlib.import_module("cupy").cuda.get_current_stream
        self._library = library
        self._group = self._nccl.NcclCommunicator(comm.size, unique, comm.rank)

    def prepare(self, count: int) -> tuple[Vector, Call]:
        vector, library, nccl = Vector(self._library, count), self._library, self._nccl
        address, all_reduce = vector.array.data.ptr, self._group.allReduce

        def call() -> None:
            all_reduce(address, address, count, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, self._stream().ptr)
            library.synchronize()

        return vector, call


class Field:
    """All that are measured. Made and closed collectively.

    Attributes:
        contenders: In the order of the table.
        device: The name of rank 0's device, and how many the ranks have together.
        left_out: The peers that are not measured, and why; empty: none.
    """

    def __init__(self, comm: Communicator, peers: Sequence[str]) -> None:
        library = find_library()(comm.local_rank)
        name, own = library.device()
        devices: list[tuple[int, str]] = comm.allgather_object((comm.cross_rank, own))
        self.device = f"{name} x {len(set(devices))}"
        self.contenders: list[Contender[Any]] = [OnDevice(comm, library), Copy(library, to_host=True)]
        self.contenders += [OnHost(comm), Copy(library, to_host=False)]
        self._group = GlooGroup(comm) if peers and isinstance(library, Torch) else None
        reasons = []
        for peer in peers:
            found, reason = _peer(comm, library, peer, is_shared=len(set(devices)) < comm.size)
            self.contenders += [] if found is None else [found]
            reasons += [f"{_NAMES[peer]} was left out: {reason}"] if reason else []
        self.left_out = "; ".join(reasons)

    def close(self) -> None:
        """Ends what the libraries have for it."""
        for contender in self.contenders:
            contender.close()
        if self._group is not None:
            self._group.close()


def _peer(
    comm: Communicator, library: Library, peer: str, *, is_shared: bool
) -> tuple[Contender[Vector] | None, str]:
    """A peer that works on all ranks, or why there is none. Collective."""
    if peer == "nccl" and is_shared:
        return None, "it takes one GPU for each rank, and ranks share one"
    if peer == "gloo" and not isinstance(library, Torch):
        return None, "it takes PyTorch's tensors, and PyTorch sees no device"
    of_torch = isinstance(library, Torch)
    # First what each rank finds out by itself: in what follows they wait for each other.
    unique, reason = (None, "") if of_torch else _attempt(lambda: _nccl_of_cupy().get_unique_id())
    found: Contender[Vector] | None = None
    if not (reasons := [each for each in comm.allgather_object(reason) if each]):
        unique = comm.broadcast_object(unique)

        def connect() -> Contender[Vector]:
            made = OfTorch(library, peer) if of_torch else NcclOfCupy(comm, library, unique)
            _arrays, call = made.prepare(1)  # which have to live as long as the call
            call()
            return made

        found, reason = _attempt(connect)
        reasons = [each for each in comm.allgather_object(reason) if each]
    return (None, reasons[0]) if reasons else (found, "")


def _nccl_of_cupy() -> Any:
    nccl = importlib.import_module("cupy.cuda.nccl")
    if not nccl.available:
        raise ImportError("CuPy finds no libnccl.so.2")
    return nccl


def _attempt(make: Callable[[], Any]) -> tuple[Any, str]:
    """What `make` returns, or why it raised: each library has kinds of its own."""
    try:
        return make(), ""
    except MultiringError:
        raise
    except Exception as error:
        return None, f"{type(error).__name__}: {error}".splitlines()[0]
