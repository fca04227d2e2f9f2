"""Collectives of several arrays at once, which integrations submit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from multiring.arrays import use_of
from multiring.collectives import Collectives
from multiring.reductions import NativeReduction
from multiring.types import Array
from multiring.work import Work

__all__ = ["ArrayLists", "Arrays"]


class Arrays(NamedTuple):
    """The arrays of a collective.

    Attributes:
        inputs: Arrays of one dtype in host memory, one after the other; or one array anywhere. None for a
            scatter elsewhere than on its root.
        outputs: Arrays for the result, one after the other, of any shapes; none: this rank gets no result.
        shape: Shape of the inputs together.
        is_copied: Whether one input is copied when the operation begins: an output lies in its memory.
    """

    inputs: Sequence[Array]
    outputs: Sequence[Array]
    shape: Sequence[int]
    is_copied: bool = False


class ArrayLists(Collectives):
    """The collectives, with those that integrations need besides."""

    def arrays_async(
        self,
        kind: str,
        arrays: Arrays,
        name: str | None = None,
        *,
        root: int = -1,
        reduction: NativeReduction | None = None,
        splits: Sequence[int] = (),
        expected: Sequence[int] = (),
        timeout: float | None = None,
    ) -> Work:
        """Submit a collective that reads several arrays and writes several.

        Args:
            kind: "ALLREDUCE" and so on: a member of `OpKind`.
            arrays: What it reads and writes.
            name: Name in messages; has to be the same on all ranks.
            root: Rank of the root, where there is one.
            reduction: How the arrays are reduced, if they are.
            splits: For an alltoall, rows for each rank.
            expected: For an alltoall, rows that have to come from each rank.
            timeout: Seconds that the operation may take from when it begins.

        Returns:
            The work, whose result is None.
        """
        operation = self._operation(kind, name, root)
        if reduction is not None:
            operation.set_reduction(*reduction)
        inputs, outputs, shape, is_copied = arrays
        if len(inputs) == 1 and tuple(inputs[0].shape) == tuple(shape):
            operation.set_input(inputs[0], is_copied)
        elif inputs:
            operation.set_inputs(list(inputs), list(shape))
        if splits:
            operation.set_splits(list(splits))
        operation.set_expected(list(expected))
        if len(outputs) == 1:
            operation.set_output(outputs[0])
        else:
            operation.set_outputs(list(outputs))
        return self._submit(operation, lambda done: None, 0, timeout)

    def await_queued(self, x: Array, *, is_written: bool = False) -> None:
        """Wait until no queued operation writes to the contiguous array `x`.

        Args:
            x: The array, which is read afterwards.
            is_written: Whether it is written to, so that no queued operation may read it either.
        """
        self._core.await_queued(self._core.last_conflict(use_of(x, is_written=is_written)))
