"""The buckets of a plan in memory: slots to write gradients into, flags to raise and to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from multiring.bucketing import Bucket, ParameterSpec, Plan, capacity, flag_bits, itemsize

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["BucketMemory", "Bytes", "numpy_array"]

Bytes = NDArray[np.uint8]


def numpy_array(data: Bytes, dtype: str) -> Any:
    """The bytes as a NumPy array; NumPy itself knows no bfloat16."""
    return data.view(np.dtype(dtype))


class BucketMemory:
    """Symmetric memory laid out by a plan; ordinary memory where there is one rank. Creation is collective.

    Attributes:
        arrays: Per bucket, the array to reduce: all slots and flags, shape (elements,).
        names: Per bucket, what error messages call it; the same on every rank.
        bucket_of: Per parameter, the number of its bucket.
    """

    def __init__(
        self,
        comm: Communicator | None,
        plan: Plan,
        specs: Sequence[ParameterSpec],
        *,
        title: str,
        scale: float,
        as_array: Callable[[Bytes, str], Any] = numpy_array,
    ) -> None:
        """Allocate and clear.

        Args:
            comm: Communicator of the reduction, None with one rank.
            plan: What lies where.
            specs: The parameters of the plan.
            title: First word of the buckets' names.
            scale: Factor that a reduction multiplies with.
            as_array: Makes an array for the reduction of bytes and a dtype.
        """
        self._rank, self._size = (0, 1) if comm is None else (comm.rank, comm.size)
        self._specs, self._title, self._scale, self._as_array = specs, title, scale, as_array
        nbytes = capacity(specs, self._size)
        if comm is None:
            self._arena: Bytes = np.zeros(nbytes, dtype=np.uint8)
        else:
            self._arena = comm.symmetric_empty((nbytes,), np.uint8)
            self._arena[:] = 0  # no stray NaN in the padding, and pages come from this rank's memory node
        self._lay_out(plan)

    def rearrange(self, plan: Plan) -> None:
        """Move all slots to where another plan has them, with their contents. Local.

        To be called when no bucket is on its way.
        """
        contents = {index: self.slot(index).copy() for index in self._slots}
        self._arena[:] = 0
        self._lay_out(plan)
        for index, content in contents.items():
            self.slot(index)[:] = content

    def _lay_out(self, plan: Plan) -> None:
        self._plan = plan
        self._slots = {slot.index: slot for bucket in plan.buckets for slot in bucket.slots}
        self.bucket_of = {slot.index: k for k, bucket in enumerate(plan.buckets) for slot in bucket.slots}
        self._flags = [self._flag_view(bucket) for bucket in plan.buckets]
        self._raised = [flag_bits(bucket.dtype, self._scale, self._size) for bucket in plan.buckets]
        self.arrays = [
            self._as_array(self._arena[b.offset : b.offset + b.nbytes], b.dtype) for b in plan.buckets
        ]
        self.names = [_bucket_name(self._title, k, b, self._specs) for k, b in enumerate(plan.buckets)]

    def slot(self, index: int) -> Bytes:
        """Memory of one gradient. Shape (nbytes,)."""
        place = self._slots[index]
        return self._arena[place.offset : place.offset + place.nbytes]

    def raise_flags(self, number: int, produced: Sequence[int], active: bool) -> None:
        """Set this rank's flags of a bucket before it leaves.

        Args:
            number: Number of the bucket.
            produced: Per slot of the bucket 1 or 0: this rank has a new gradient.
            active: This rank has data.
        """
        flags, raised = self._flags[number], self._raised[number]
        flags[:] = 0
        flags[: len(produced)] = np.where(produced, flags.dtype.type(raised), 0)
        if active:
            flags[len(produced) + self._rank] = raised

    def read_flags(self, number: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Flags of all ranks after the reduction: (per slot: any rank produced it, per rank: it has data)."""
        flags = self._flags[number] != 0
        slots = len(self._plan.buckets[number].slots)
        return flags[:slots], flags[slots:]

    def _flag_view(self, bucket: Bucket) -> NDArray[Any]:
        """Flags as unsigned integers of the element's width: their bits are set and tested here."""
        data = self._arena[bucket.flags_offset : bucket.offset + bucket.nbytes]
        return data.view(np.dtype(f"u{itemsize(bucket.dtype)}"))


def _bucket_name(title: str, number: int, bucket: Bucket, specs: Sequence[ParameterSpec]) -> str:
    names = [specs[slot.index].name for slot in bucket.slots]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{title}[{number}]: {names[0]}{more}"
