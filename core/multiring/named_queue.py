"""Operations that are matched by name, in whatever order the ranks submit them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiring import _core
from multiring.arrays import as_array, contiguous, empty_like, target_for
from multiring.collectives import into
from multiring.reductions import explain_arguments, native_comm_dtype, reduce_op
from multiring.types import Array, CommDtypeName, ReduceOpName
from multiring.work import Work

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["NamedQueue"]


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

    def __init__(self, core: _core.NamedQueue, comm: Communicator) -> None:
        self._core = core
        self.comm: Communicator = comm
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
    def allreduce(
        self,
        x: Array,
        *,
        name: str,
        op: ReduceOpName = "sum",
        out: Array | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        priority: int = 0,
        step: int = 0,
        comm_dtype: CommDtypeName | None = None,
    ) -> Array:
        """Reduces `x` over all ranks as `Communicator.allreduce` does, with the peers' submission of `name`.

        Args:
            x: Array of any shape, the same number of elements and dtype on all ranks.
            name: What the peers call it, up to 4096 bytes.
            op: "sum", "average", "min", "max" or "product".
            out: Array for the result; may be `x` itself. A new one of the kind of `x` if None.
            prescale: Factor for each input before the reduction.
            postscale: Factor for the result.
            priority: What all ranks have submitted leaves in the order of priority, highest first; rank 0's
                counts.
            step: A number that has to be the same on all ranks. Who counts steps (or calls) finds out that
                one which failed on some ranks only has left operations out there.

        Returns:
            `out`, or the new array.
        """
        work = self.allreduce_async(
            x,
            name=name,
            op=op,
            out=out,
            prescale=prescale,
            postscale=postscale,
            priority=priority,
            step=step,
            comm_dtype=comm_dtype,
        )
        reduced: Array = work.wait()
        return reduced

    @explain_arguments
    def allreduce_async(
        self,
        x: Array,
        *,
        name: str,
        op: ReduceOpName = "sum",
        out: Array | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        priority: int = 0,
        step: int = 0,
        comm_dtype: CommDtypeName | None = None,
    ) -> Work:
        """Like `allreduce`, without waiting: for the peers neither."""
        x = as_array(x)
        source = contiguous(x)
        target = empty_like(source) if out is None else target_for(out)
        operation = _core.Operation(_core.OpKind.ALLREDUCE)
        operation.set_reduction(reduce_op(op), prescale, postscale, native_comm_dtype(comm_dtype))
        operation.set_input(source)
        operation.set_output(target)
        return Work(self._core.submit(name, operation, priority, step), into(out, target), self)

    def abort(self, message: str) -> None:
        """Breaks the queue on all ranks: pending and later operations raise `AbortedError`."""
        self._core.abort(f"rank {self.rank} on {self.comm.host} aborted: {message}")

    def close(self) -> None:
        """Ends this rank's part. Pending operations fail; peers that still need this rank raise
        `PeerLostError`. Idempotent, and no collective. Done by `Communicator.close` and
        `multiring.shutdown`."""
        self._core.close()
