"""The collectives of a communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from multiring import _core as native
from multiring.arrays import (
    Pieces,
    as_array,
    empty_like,
    like,
    mutable,
    set_arrays,
    set_input,
    set_output,
    without_gradient,
)
from multiring.errors import UsageError
from multiring.reductions import (
    CrossingKeywords,
    NativeReduction,
    check_crossing,
    native_crossing,
    native_reduction,
    reduce_op,
)
from multiring.types import Array, OrderName, QueueKeywords, ReduceOpName
from multiring.work import Work, seconds

__all__ = ["Collectives", "Finish"]

Finish = Callable[[native.Operation | native.Work], Any]


class Collectives:
    """What the ranks of a group do together; `Communicator` is the class to use.

    Attributes:
        rank: Rank of this process in the group, 0 to size - 1.
        size: Number of ranks in the group.
    """

    rank: int
    size: int
    _core: native.Communicator
    _plain_allreduce: Callable[..., bool]

    @property
    def is_broken(self) -> bool:
        """Whether an error of any rank has broken the group."""
        return self._core.is_broken

    # The operation that everything depends on has a path of its own, with as few steps as possible.

    def allreduce(
        self,
        x: Array,
        op: ReduceOpName = "sum",
        out: Array | None = None,
        name: str | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        timeout: float | None = None,
        **crossing: Unpack[CrossingKeywords],
    ) -> Array:
        """Reduces `x` element by element over all ranks; every rank gets the result.

        Args:
            x: Array of any shape, the same number of elements and dtype on all ranks.
            op: "sum", "average" (true division; integers truncate toward zero), "min", "max" or "product"; of
                integers and bool, without scale factors, "bitwise_and", "bitwise_or" or "bitwise_xor". Bool
                has no sum and no average: take "max" (any), "min" (all), or integers to count.
            out: Array for the result, of the same dtype and number of elements; may be `x` itself. A new one
                of the kind of `x` if None.
            name: Name in messages; has to be the same on all ranks.
            prescale: Factor for each input before the reduction.
            postscale: Factor for the result.
            timeout: Seconds to wait for the other ranks.
            crossing: `comm_dtype` and `order`, see `CrossingKeywords`.

        Returns:
            `out`, or the new array.
        """
        if out is not None and self._plain_allreduce(
            x, out, op, name, prescale, postscale, timeout, crossing
        ):
            return out
        x = as_array(x)
        if out is None:
            out = empty_like(x)
            if self._plain_allreduce(x, out, op, name, prescale, postscale, timeout, crossing):
                return out
        else:
            without_gradient(mutable(out))
        check_crossing(Collectives.allreduce, crossing)
        wait = seconds(timeout)
        factors = reduce_op(op), name or "", prescale, postscale, wait, native_crossing(**crossing)
        if not self._core.allreduce(x, out, *factors):
            operation = self._operation("ALLREDUCE", name)
            operation.set_reduction(*native_reduction(op, prescale, postscale, **crossing))
            return self._run(operation, set_arrays(operation, x, out), timeout)
        return out

    def allreduce_async(
        self,
        x: Array,
        op: ReduceOpName = "sum",
        out: Array | None = None,
        name: str | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        priority: int = 0,
        timeout: float | None = None,
        **crossing: Unpack[CrossingKeywords],
    ) -> Work:
        """Like `allreduce`, without waiting. Of the operations that all ranks have submitted, those of higher
        `priority` run first; small ones run together, unless they may add in any order. `timeout` counts from
        when the operation begins; of those that run together, the longest holds."""
        check_crossing(Collectives.allreduce_async, crossing)
        operation = self._operation("ALLREDUCE", name)
        operation.set_reduction(*native_reduction(op, prescale, postscale, **crossing))
        return self._submit(operation, set_arrays(operation, x, out), priority, timeout)

    def allreduce_pieces_async(
        self,
        pieces: Pieces,
        op: ReduceOpName,
        name: str | None,
        prescale: float,
        postscale: float,
        **crossing: Unpack[CrossingKeywords],
    ) -> Work:
        """`allreduce_async`, in place, of an array that lies in pieces; for adapters.

        Ranks may cut differently, and give a whole array of as many elements to `allreduce_async`.

        The other arguments are those of `allreduce`. The result of the work is None.
        """
        operation = self._operation("ALLREDUCE", name)
        operation.set_reduction(*native_reduction(op, prescale, postscale, **crossing))
        operation.set_pieces(*pieces)
        return self._submit(operation, lambda done: None, 0)

    def reduce_scatter(
        self,
        x: Array,
        op: ReduceOpName = "sum",
        out: Array | None = None,
        name: str | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        timeout: float | None = None,
        order: OrderName | None = None,
    ) -> Array:
        """Reduces `x` over all ranks; rank i gets block i of the result.

        Axis 0 is split as `numpy.array_split` does: the first `len(x) % size` blocks are one row longer.

        Args:
            x: Array of the same shape and dtype on all ranks, at least one-dimensional.
            out: Array for this rank's block; a new one if None.
            order: In which order elements are added, see `CrossingKeywords`.

        The other arguments are those of `allreduce`.

        Returns:
            This rank's block, shape (rows of the block, *x.shape[1:]).
        """
        reduction = native_reduction(op, prescale, postscale, order=order)
        return self._run(*self._reduce_scatter(x, out, name, reduction), timeout)

    def reduce_scatter_async(
        self,
        x: Array,
        op: ReduceOpName = "sum",
        out: Array | None = None,
        name: str | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        order: OrderName | None = None,
        **queued: Unpack[QueueKeywords],
    ) -> Work:
        """Like `reduce_scatter`, without waiting."""
        reduction = native_reduction(op, prescale, postscale, order=order)
        return self._submit(*self._reduce_scatter(x, out, name, reduction), **queued)

    def _reduce_scatter(
        self, x: Array, out: Array | None, name: str | None, reduction: NativeReduction
    ) -> tuple[native.Operation, Finish]:
        operation = self._operation("REDUCE_SCATTER", name)
        operation.set_reduction(*reduction)
        return operation, self._join(operation, x, out)

    def allgather(
        self, x: Array, out: Array | None = None, name: str | None = None, timeout: float | None = None
    ) -> Array:
        """Joins the arrays of all ranks along axis 0, in the order of the ranks.

        Args:
            x: Array; ranks may have different lengths along axis 0, all other extents and the dtype are the
                same. A zero-dimensional array counts as one row.
            out: Array for the result; a new one if None.
            name: Name in messages; has to be the same on all ranks.
            timeout: Seconds to wait for the other ranks.

        Returns:
            The joined array, shape (sum of lengths, *x.shape[1:]).
        """
        return self._run(*self._allgather(x, out, name), timeout)

    def allgather_async(
        self, x: Array, out: Array | None = None, name: str | None = None, **queued: Unpack[QueueKeywords]
    ) -> Work:
        """Like `allgather`, without waiting."""
        return self._submit(*self._allgather(x, out, name), **queued)

    def _allgather(self, x: Array, out: Array | None, name: str | None) -> tuple[native.Operation, Finish]:
        operation = self._operation("ALLGATHER", name)
        return operation, self._join(operation, x, out)

    def broadcast(
        self,
        x: Array,
        root: int = 0,
        out: Array | None = None,
        name: str | None = None,
        timeout: float | None = None,
    ) -> Array:
        """Gives every rank the array of rank `root`.

        Args:
            x: Array of the same number of elements and dtype on all ranks; its values count on `root` only.
            root: Rank that has the data.
            out: Array for the result, `x` itself to work in place; a new one if None.
            name: Name in messages; has to be the same on all ranks.
            timeout: Seconds to wait for the other ranks.

        Returns:
            `out`, or the new array.
        """
        return self._run(*self._broadcast(x, root, out, name), timeout)

    def broadcast_async(
        self,
        x: Array,
        root: int = 0,
        out: Array | None = None,
        name: str | None = None,
        **queued: Unpack[QueueKeywords],
    ) -> Work:
        """Like `broadcast`, without waiting."""
        return self._submit(*self._broadcast(x, root, out, name), **queued)

    def _broadcast(
        self, x: Array, root: int, out: Array | None, name: str | None
    ) -> tuple[native.Operation, Finish]:
        operation = self._operation("BROADCAST", name, root)
        return operation, set_arrays(operation, x, out)

    def alltoall(
        self,
        x: Array,
        splits: Sequence[int] | None = None,
        name: str | None = None,
        timeout: float | None = None,
    ) -> Array | tuple[Array, npt.NDArray[np.int64]]:
        """Sends block i of `x` to rank i; every rank joins what it receives along axis 0.

        Args:
            x: Array, at least one-dimensional; all extents but the first and the dtype are the same on all
                ranks.
            splits: Rows for each rank, adding up to `len(x)`; None splits axis 0 as `numpy.array_split` does.
            name: Name in messages; has to be the same on all ranks.
            timeout: Seconds to wait for the other ranks.

        Returns:
            The received rows; with `splits` given, also the number of rows from each rank (int64, shape
            (size,)).
        """
        return self._run(*self._alltoall(x, splits, name), timeout)

    def alltoall_async(
        self,
        x: Array,
        splits: Sequence[int] | None = None,
        name: str | None = None,
        **queued: Unpack[QueueKeywords],
    ) -> Work:
        """Like `alltoall`, without waiting."""
        return self._submit(*self._alltoall(x, splits, name), **queued)

    def _alltoall(
        self, x: Array, splits: Sequence[int] | None, name: str | None
    ) -> tuple[native.Operation, Finish]:
        operation = self._operation("ALLTOALL", name)
        x = set_input(operation, x)
        rows = operation.rows
        even = [rows // self.size + (rank < rows % self.size) for rank in range(self.size)]
        operation.set_splits(even if splits is None else self._checked_splits(splits))

        def finish(done: native.Operation | native.Work) -> Any:
            result = done.result()
            joined = like(x, result)
            return joined if splits is None else (joined, np.array(result.received, np.int64))

        return operation, finish

    def _checked_splits(self, splits: Sequence[int]) -> list[int]:
        rows = [int(split) for split in splits]
        if any(count < 0 for count in rows):
            raise UsageError(f"splits are {rows}; expected {self.size} numbers of at least 0")
        return rows

    def gather(
        self, x: Array, root: int = 0, name: str | None = None, timeout: float | None = None
    ) -> Array | None:
        """Like `allgather`, but rank `root` alone gets the result; the others get None."""
        return self._run(*self._gather(x, root, name), timeout)

    def gather_async(
        self, x: Array, root: int = 0, name: str | None = None, **queued: Unpack[QueueKeywords]
    ) -> Work:
        """Like `gather`, without waiting."""
        return self._submit(*self._gather(x, root, name), **queued)

    def _gather(self, x: Array, root: int, name: str | None) -> tuple[native.Operation, Finish]:
        operation = self._operation("GATHER", name, root)
        finish = self._join(operation, x, None)
        return operation, finish if self.rank == root else lambda done: None

    def scatter(
        self, x: Array | None, root: int = 0, name: str | None = None, timeout: float | None = None
    ) -> Array:
        """Gives rank i block i of the array of rank `root`.

        Args:
            x: On `root` the array, split along axis 0 as `numpy.array_split` does; ignored (None) elsewhere.
            root: Rank that has the data.
            name: Name in messages; has to be the same on all ranks.
            timeout: Seconds to wait for the other ranks.

        Returns:
            This rank's block: of the kind of `x` where one is given, a NumPy array elsewhere.
        """
        return self._run(*self._scatter(x, root, name), timeout)

    def scatter_async(
        self, x: Array | None, root: int = 0, name: str | None = None, **queued: Unpack[QueueKeywords]
    ) -> Work:
        """Like `scatter`, without waiting."""
        return self._submit(*self._scatter(x, root, name), **queued)

    def _scatter(self, x: Array | None, root: int, name: str | None) -> tuple[native.Operation, Finish]:
        operation = self._operation("SCATTER", name, root)
        if self.rank == root:
            if x is None:
                raise UsageError(f"rank {root} is the root of a scatter and has to give an array")
            x = set_input(operation, x)
        return operation, lambda done: like(x, done.result())

    def barrier(self, timeout: float | None = None) -> None:
        """Returns when all ranks have called it."""
        self._core.run(self._operation("BARRIER", None), seconds(timeout))

    def barrier_async(self, **queued: Unpack[QueueKeywords]) -> Work:
        """Like `barrier`, without waiting."""
        return self._submit(self._operation("BARRIER", None), lambda done: None, **queued)

    # Shared by the collectives.

    def _operation(self, kind: str, name: str | None, root: int = -1) -> native.Operation:
        return native.Operation(getattr(native.OpKind, kind), name or "", root)

    def _join(self, operation: native.Operation, x: Array, out: Array | None) -> Finish:
        """Sets input and output of an operation whose result has other extents than its input."""
        source = set_input(operation, x)
        return (lambda done: like(source, done.result())) if out is None else set_output(operation, out)

    def _run(self, operation: native.Operation, finish: Finish, timeout: float | None) -> Any:
        self._core.run(operation, seconds(timeout))
        return finish(operation)

    def _submit(
        self, operation: native.Operation, finish: Finish, priority: int = 0, timeout: float | None = None
    ) -> Work:
        return Work(self._core.submit(operation, priority, seconds(timeout)), finish, self)
