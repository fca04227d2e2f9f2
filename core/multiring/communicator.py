"""The communicator: a group of ranks that run collectives together."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from multiring import _core
from multiring.array_lists import ArrayLists
from multiring.arrays import set_input, set_output
from multiring.errors import MultiringError, UsageError
from multiring.messages import Message, Probe
from multiring.named_queue import NamedQueue
from multiring.objects import pickled, receive_object, send_object, unpickled
from multiring.reductions import comm_dtype_name
from multiring.types import Array, CommDtypeName
from multiring.work import seconds

__all__ = ["Communicator"]


class Communicator(ArrayLists):
    """A group of ranks that run collectives together.

    Every rank of the group has to issue the same collectives in the same order, with the same `name`
    (compared, never searched for). What the ranks asked for is compared before data moves.

    Semantics shared by all collectives:

    - Arrays come in by buffer protocol or DLPack without a copy, and results are of the same kind as the
      input. Arrays that are not contiguous are copied, and so are those on CUDA devices, to host memory and
      back (docs/devices.md). `out` may be the input itself where it fits, but must not overlap it otherwise.
    - Reductions combine in one canonical order, a balanced binary tree over the rank numbers, so the bits of
      a result depend on the inputs and the number of ranks only, and are the same on all ranks. Where an
      allreduce crosses hosts in half precision (`comm_dtype`), or may add in any order (`order`), they
      depend on the placement as well.
    - `timeout` is in seconds; None means the communicator's default (MULTIRING_TIMEOUT).
    - A synchronous call first waits for the asynchronous ones submitted before it. The `_async` forms return
      a `Work` at once and run on a progress thread.
    - Errors: `UsageError` (nothing was sent), `MismatchError`, `TimeoutError`, `PeerLostError`,
      `AbortedError`, `InternalError`. After any but a `UsageError` the communicator is broken: what is
      pending raises that error, and so does the next call where the program has not been told of it yet;
      every later call raises `AbortedError` naming it.
    """

    def __init__(
        self,
        core: _core.Communicator,
        *,
        enclosing: Sequence[weakref.WeakSet[Communicator]] = (),
    ) -> None:
        self._core = core
        self._plain_allreduce = core.plain_allreduce()
        self.rank: int = core.rank
        """Rank of this process in the group, 0 to size - 1."""
        self.size: int = core.size
        """Number of ranks in the group."""
        hosts = core.hosts
        here = hosts[core.rank]
        self.local_rank: int = hosts[: core.rank].count(here)
        """Rank among the group's ranks on this host."""
        self.local_size: int = hosts.count(here)
        """Number of the group's ranks on this host."""
        different = list(dict.fromkeys(hosts))
        self.cross_rank: int = different.index(here)
        """Number of this host among the group's hosts, in the order of their first ranks."""
        self.cross_size: int = len(different)
        """Number of the group's hosts."""
        # All that were split from this one, and from those in turn; and the sets that this one is part of.
        self._descendants: weakref.WeakSet[Communicator] = weakref.WeakSet()
        self._queues: list[_core.NamedQueue] = []
        self._enclosing = tuple(enclosing)
        for group in self._enclosing:
            group.add(self)

    @property
    def name(self) -> str:
        """Name of the group in messages."""
        return self._core.name

    @property
    def host(self) -> str:
        """Name of this rank's host."""
        return self._core.host

    @property
    def comm_dtype(self) -> CommDtypeName:
        """The `comm_dtype` of allreduces that do not say (MULTIRING_COMM_DTYPE)."""
        return comm_dtype_name(self._core.comm_dtype)

    @property
    def timeout(self) -> float:
        """Seconds that an operation waits for other ranks where it does not say (MULTIRING_TIMEOUT). Can be
        set, on each rank by itself: for all operations that begin later, and groups that are split off later.
        """
        return self._core.timeout

    @timeout.setter
    def timeout(self, timeout: float) -> None:
        self._core.timeout = timeout

    def __repr__(self) -> str:
        return f"<multiring.Communicator {self.name!r} rank {self.rank} of {self.size}>"

    # Point to point.

    def send(self, x: Array, dst: int, tag: int = 0, timeout: float | None = None) -> None:
        """Sends an array to rank `dst`, which has to call `recv`.

        Messages between two ranks are received in the order in which they were sent; the tags are compared.
        Returns when `x` may be changed: at once for a message of up to 128 KiB if none is under way. Only the
        first message to a rank of another host waits until that rank is in any call, to connect with it.
        """
        operation = self._operation("SEND", None, dst)
        set_input(operation, x)
        self._core.send(operation, tag, seconds(timeout))

    def prepared_send(self, x: Array, dst: int, tag: int = 0) -> Callable[[], None]:
        """Return a function that sends an array as it is when the operations have ended that are queued now;
        for integrations that send in another thread."""
        operation = self._operation("SEND", None, dst)
        set_input(operation, x)
        after = self._core.last_conflict(operation)
        return lambda: self._core.send(operation, tag, -1.0, after)

    def recv(self, src: int, out: Array | None = None, tag: int = 0, timeout: float | None = None) -> Array:
        """Receives an array from rank `src`.

        Args:
            src: Rank that sends.
            out: Array of the dtype and size that is expected; if None, a NumPy array of the dtype and shape
                that was sent (bfloat16 as uint16) is made.
            tag: Has to be that of the message.
            timeout: Seconds to wait for the message.
        """
        return self._receive(src, out, tag, timeout, None)

    def _receive(
        self, src: int, out: Array | None, tag: int, timeout: float | None, after: int | None
    ) -> Array:
        """Receive when the operations up to the number `after` have ended; None: what is queued now and uses
        the memory of `out`."""
        operation = self._operation("RECV", None, src)
        finish = None if out is None else set_output(operation, out)
        self._core.recv(operation, tag, seconds(timeout), after)
        return operation.result().numpy() if finish is None else finish(operation)

    def probe(self, src: int | None = None, timeout: float | None = None) -> Message:
        """Waits for a message without receiving it, and tells what it is; `recv` then gets it at once.

            message = comm.probe()  # of any rank
            array = comm.recv(message.source, tag=message.tag)

        Each message is told once, as by MPI_Mprobe: until it is received, `probe` passes over its source. Of
        several ranks that have sent, each gets its turn.

        Args:
            src: Rank that sends; None: any. Then a rank that dies is an error, for the message may be its
                own, and one that leaves is none as long as another can send.
            timeout: Seconds to wait for the message.

        Raises:
            TimeoutError: None has come, or one has that was told before. Nothing is broken: call it again.
        """
        asked = [] if src is None else [src]
        found = self.stoppable_probe().wait(asked, asked, timeout)
        assert found is not None  # nobody stops it
        return found

    def stoppable_probe(self) -> Probe:
        """`probe` for one thread, which others can stop."""
        return Probe(self._core)

    # Objects.

    def broadcast_object(self, obj: Any, root: int = 0, *, name: str = "broadcast_object") -> Any:
        """Gives every rank the picklable object of rank `root`. The job's own ranks are trusted.

        The object travels in pieces of up to 8 MiB while it is pickled, so no rank holds a pickled copy of it
        (of long strings, a receiver does). An array that is read-only on `root` is read-only everywhere.

        Args:
            obj: That of rank `root`; those of the others are ignored.
            root: The rank that has it.
            name: What errors call it; the same on all ranks.

        Raises:
            UsageError: `root` could not pickle its object; what pickling raised is raised there. What a rank
                cannot unpickle raises on this rank alone. The communicator still works.
        """
        if self.rank == root:
            return send_object(self, obj, root, name)
        return receive_object(self, root, name)

    def allgather_object(self, obj: Any, *, name: str = "allgather_object") -> list[Any]:
        """Returns the picklable objects of all ranks, in the order of the ranks.

        Args:
            obj: This rank's.
            name: What errors call it; the same on all ranks.

        Raises:
            UsageError: Some rank could not pickle its object; what pickling raised is raised there. The
                communicator still works.
        """
        data, failure = pickled(obj)
        lengths = self.allgather(np.array([data.size], np.int64), name=name)  # then the data
        joined = self.allgather(data, name=name)
        if failure is not None:
            raise failure
        return unpickled(self, name, joined, lengths)

    # Groups and memory.

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Splits the group into one communicator for each `color`; collective over this group.

        Args:
            color: Integer of at least 0, ranks of equal color form a group; None takes part in none.
            key: Order of the ranks in the new group; ties keep their order here.

        Returns:
            The new communicator, or None where `color` is None.
        """
        if color is not None and color < 0:
            raise UsageError(f"color is {color}; expected an integer of at least 0, or None for no group")
        core = self._core.split(-1 if color is None else color, key, -1.0)
        if core is None:
            return None
        return Communicator(core, enclosing=[*self._enclosing, self._descendants])

    def process_set(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator of some ranks, in the order given; collective over this group, with the same `ranks`
        everywhere.

        Returns:
            The new communicator, or None on ranks that are not in it.
        """
        members = [int(rank) for rank in ranks]
        if len(set(members)) != len(members) or not all(0 <= rank < self.size for rank in members):
            raise UsageError(f"process set {members}: expected different ranks from 0 to {self.size - 1}")
        # A split compares nothing: ranks that were given other ranks would form groups that nobody asked for.
        self._core.run(self._operation("BARRIER", f"process_set {members}"), -1.0)
        inside = self.rank in members
        return self.split(0 if inside else None, members.index(self.rank) if inside else 0)

    def named_queue(self, name: str = "queue") -> NamedQueue:
        """A new queue for operations that are matched by name, in any order; collective over this group.

        The queue has communicators of its own, so that it never gets between the group's other operations.

        Args:
            name: Name of the queue in messages; has to be the same on all ranks.
        """
        core = _core.NamedQueue(self._core, name, -1.0)
        self._queues = [queue for queue in self._queues if not queue.is_closed]
        self._queues.append(core)
        return NamedQueue(core, self)

    def symmetric_empty(
        self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32
    ) -> npt.NDArray[Any]:
        """An array in memory that every rank of the host has mapped: an allreduce on it (or on views of it,
        in place or into another such array) copies nothing.

        Collective: all ranks pass the same number of bytes and then use corresponding arrays together. The
        memory is freed when the last rank has let go of its array. Contents are undefined.

        Args:
            shape: One extent, or one for each axis.
            dtype: Of the fixed-size dtypes of NumPy. For bfloat16, view uint16 as it.
        """
        extents = [operator.index(extent) for extent in (shape if isinstance(shape, Sequence) else [shape])]
        if any(extent < 0 for extent in extents):
            raise UsageError(f"shape {extents} has a negative extent")
        return self._core.symmetric_empty(extents, np.dtype(dtype), -1.0)

    def symmetric_peer(self, x: npt.NDArray[Any], rank: int) -> npt.NDArray[Any]:
        """The array of rank `rank` that corresponds to this rank's `x`: the same memory, seen from here.

        Reads and writes are not synchronised with that rank; put barriers around them.

        Args:
            x: An array of `symmetric_empty`, or a C-ordered view of one.
            rank: Any rank of the group, this one included.

        Raises:
            UsageError: `x` does not lie in this group's symmetric memory, or there is no such rank.
        """
        return self._core.symmetric_peer(x, rank)

    def abort(self, message: str) -> None:
        """Breaks the communicator and its named queues on all ranks: their pending and later calls raise
        `AbortedError`."""
        text = f"rank {self.rank} on {self.host} aborted: {message}"
        for queue in self._queues:
            if not queue.is_closed:
                queue.abort(text)
        self._core.abort(text)

    def _fail(self, error: BaseException) -> None:
        """Tells the peers, in this group and those split from it, why this rank ends: ranks that wait for it
        would learn only that it has left. What is broken already keeps its first error."""
        message = (str(error) or "no message").splitlines()[0][:300]
        for communicator in [*self._descendants, self]:
            with suppress(MultiringError):  # a queue or group that is closed
                communicator.abort(f"it ends by an uncaught {type(error).__name__}: {message}")

    def close(self) -> None:
        """Ends this rank's part in the group, its named queues and the groups split from it. Pending work
        fails; peers that still need this rank raise `PeerLostError`. Idempotent, and no collective: no rank
        waits for another."""
        for communicator in [*self._descendants, self]:
            for queue in communicator._queues:
                queue.close()
            communicator._core.close()

    def _forget_in_child(self) -> None:
        """Called in a forked child, where the group belongs to the parent."""
        for communicator in [*self._descendants, self]:
            for queue in communicator._queues:
                queue.abandon()
            communicator._core.abandon()
