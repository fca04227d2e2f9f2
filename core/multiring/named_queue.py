"""Operations that are matched by name, in whatever order the ranks submit them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Required, Unpack

from multiring import _core
from multiring.arrays import set_arrays, use_of
from multiring.collectives import Collectives, Finish
from multiring.reductions import ReductionKeywords, explain_arguments, native_reduction
from multiring.types import Array
from multiring.work import Work

__all__ = ["NamedQueue"]


class SubmissionKeywords(ReductionKeywords, total=False):
    """Keyword arguments of `NamedQueue.allreduce_async`."""

    name: Required[str]
    out: Array | None
    priority: int
    step: int
    asked: str


class NamedQueue:
    """Operations that are matched by name: the ranks may submit them in any order, several in flight, from
    any thread.

    Made by `Communicator.named_queue`. For code that does not decide itself in which order its operations
    run, as the parts of a graph that a framework executes. Where the order is known, the communicator's own
    operations cost less: nobody has to ask who has submitted what.

    A name may be submitted again, also while it is in flight: the k-th submission of a name on one rank meets
    the k-th of it on the others. Dtype, size, reduction and `step` are compared.

    Errors: those of `Communicator`. A submission that the other ranks do not match within the communicator's
    timeout (MULTIRING_TIMEOUT) raises `TimeoutError`, which says what waits for which ranks. The first error
    breaks the queue, but not its communicator.

    Attributes:
        comm: The communicator that it was made from, and ends with.
        rank: Rank of this process in it.
        size: Number of ranks.
        address: The `mr_queue*` of the C ABI (multiring.h) for native code, a valid pointer until the process
            ends: after `close` submissions are refused with MR_ABORTED.
    """

    def __init__(self, core: _core.NamedQueue, comm: Collectives) -> None:
        self._core = core
        self.comm: Collectives = comm
        self.rank: int = core.rank
        self.size: int = core.size
        self.address: int = core.address

    @property
    def name(self) -> str:
        """Name of the queue in messages."""
        return self._core.name

    @property
    def is_broken(self) -> bool:
        """Whether an error of any rank has broken the queue, or it is closed."""
        return self._core.is_broken

    def __repr__(self) -> str:
        return f"<multiring.NamedQueue {self.name!r} rank {self.rank} of {self.size}>"

    @explain_arguments
    def allreduce_async(
        self,
        x: Array,
        *,
        name: str,
        out: Array | None = None,
        priority: int = 0,
        step: int = 0,
        asked: str = "",
        **reduction: Unpack[ReductionKeywords],
    ) -> Work:
        """Reduces `x` over all ranks as `Communicator.allreduce_async` does, with the peers' submission of
        `name`. Waits for nothing, for the peers neither.

        Args:
            x: Array of any shape, the same number of elements and dtype on all ranks.
            name: What the peers call it, up to 4096 bytes.
            out: Array for the result; may be `x` itself. A new one of the kind of `x` if None.
            priority: What all ranks have submitted leaves in the order of priority, highest first; rank 0's
                counts.
            step: A number that has to be the same on all ranks. Who counts steps (or calls) finds out that
                one which failed on some ranks only has left operations out there.
            asked: What the caller asks for besides, such as a shape; compared as the dtype is, and shown in
                place of the name. The name if empty.
            reduction: `op`, `prescale`, `postscale`, `comm_dtype` and `order`, as there.
        """
        operation = _core.Operation(_core.OpKind.ALLREDUCE, asked)
        operation.set_reduction(*native_reduction(**reduction))
        finish = set_arrays(operation, x, out)
        return self._submit(name, operation, finish, priority, step)

    # The other collectives, as those of `Communicator` of the same names; `name` and `asked` as above.

    def reduce_scatter_async(
        self,
        x: Array,
        *,
        name: str,
        out: Array | None = None,
        asked: str = "",
        **reduction: Unpack[ReductionKeywords],
    ) -> Work:
        """Reduces `x` over all ranks; rank i gets block i, shape (rows of the block, *x.shape[1:])."""
        operation = _core.Operation(_core.OpKind.REDUCE_SCATTER, asked)
        operation.set_reduction(*native_reduction(**reduction))
        return self._submit(name, operation, self.comm._join(operation, x, out))

    def allgather_async(self, x: Array, *, name: str, asked: str = "") -> Work:
        """Joins the arrays of all ranks along axis 0, whose extents may differ."""
        return self._submit(name, *self.comm._allgather(x, None, asked))

    def broadcast_async(
        self, x: Array, root: int = 0, *, name: str, out: Array | None = None, asked: str = ""
    ) -> Work:
        """Gives every rank the array of rank `root`."""
        return self._submit(name, *self.comm._broadcast(x, root, out, asked))

    def alltoall_async(
        self, x: Array, splits: Sequence[int] | None = None, *, name: str, asked: str = ""
    ) -> Work:
        """Sends block i of `x` to rank i; with `splits`, the result has the rows from each rank, too."""
        return self._submit(name, *self.comm._alltoall(x, splits, asked))

    def barrier_async(self, *, name: str, asked: str = "") -> Work:
        """Complete when all ranks have submitted it."""
        return self._submit(name, _core.Operation(_core.OpKind.BARRIER, asked), lambda done: None)

    def _submit(
        self, name: str, operation: _core.Operation, finish: Finish, priority: int = 0, step: int = 0
    ) -> Work:
        return Work(self._core.submit(name, operation, priority, step), finish, self)

    @explain_arguments
    def allreduce(self, x: Array, **options: Unpack[SubmissionKeywords]) -> Array:
        """`allreduce_async`, and waits: returns `out`, or the new array."""
        reduced: Array = self.allreduce_async(x, **options).wait()
        return reduced

    def await_queued(self, x: Array, *, is_written: bool = False) -> None:
        """Wait until no operation of this queue that was submitted writes to the contiguous array `x`, or,
        with `is_written`, reads it; for integrations."""
        self._core.await_queued(use_of(x, is_written=is_written))

    def abort(self, message: str) -> None:
        """Breaks the queue on all ranks: pending and later operations raise `AbortedError`."""
        self._core.abort(f"rank {self.rank} on {self.comm._core.host} aborted: {message}")

    def close(self) -> None:
        """Ends this rank's part. Pending operations fail; peers that still need this rank raise
        `PeerLostError`. Idempotent, and no collective. Done by `Communicator.close` and
        `multiring.shutdown`."""
        self._core.close()
