"""The buckets of a plan in memory: slots to write gradients into, flags to raise and to read."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from multiring import _core
from multiring.arrays import Pieces, address_of
from multiring.gradients.bucketing import (
    Bucket,
    ParameterSpec,
    Plan,
    capacity,
    first_and_more,
    flag_bits,
    itemsize,
)
from multiring.gradients.options import ReducerOptions
from multiring.gradients.source import IN_SLOT, Gradient

if TYPE_CHECKING:
    from multiring.communicator import Communicator

__all__ = ["BucketMemory", "Bytes", "bytes_at", "numpy_array"]

Bytes = NDArray[np.uint8]


def numpy_array(data: Bytes, dtype: str) -> Any:
    """The bytes as a NumPy array; NumPy itself knows no bfloat16."""
    return data.view(np.dtype(dtype))


def bytes_at(address: int, nbytes: int) -> Bytes:
    """Memory that others own, as bytes. Shape (nbytes,)."""
    if nbytes == 0:
        return np.empty(0, dtype=np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class BucketMemory:
    """Symmetric memory laid out by a plan; ordinary memory where there is one rank. Creation is collective.

    No page of it takes memory before it is written to: the slots of gradients that are reduced elsewhere
    never do.

    Attributes:
        buckets: Those of the plan.
        arrays: Per bucket, the array to reduce: all slots and flags, shape (elements,).
        names: Per bucket, what error messages call it; the same on every rank.
        bucket_of: Per parameter, the number of its bucket.
        members: Per bucket, the parameters of its slots.
        indices: The same as arrays.
    """

    def __init__(
        self,
        comm: Communicator | None,
        plan: Plan,
        specs: Sequence[ParameterSpec],
        options: ReducerOptions,
        as_array: Callable[[Bytes, str], Any] = numpy_array,
    ) -> None:
        """Allocate and clear.

        Args:
            comm: Communicator of the reduction, None with one rank.
            plan: What lies where.
            specs: The parameters of the plan.
            options: How gradients are reduced.
            as_array: Makes an array for the reduction of bytes and a dtype.
        """
        self._rank, self._size = (0, 1) if comm is None else (comm.rank, comm.size)
        self._specs, self._options, self._as_array = specs, options, as_array
        nbytes = capacity(specs, self._size)
        # New memory is all zeros.
        self._arena: Bytes = (
            np.zeros(nbytes, dtype=np.uint8) if comm is None else comm.symmetric_empty((nbytes,), np.uint8)
        )
        self._address = address_of(self._arena)
        self._lay_out(plan)

    def rearrange(self, plan: Plan, unused: Collection[int] = ()) -> None:
        """Move all slots to where another plan has them, with their contents. Local.

        To be called when no bucket is on its way.

        Args:
            plan: What lies where from now on.
            unused: Parameters whose slots have no content.
        """
        contents = {index: self.slot(index).copy() for index in self._slots if index not in unused}
        self._lay_out(plan)
        for index, content in contents.items():
            self.slot(index)[:] = content

    def _lay_out(self, plan: Plan) -> None:
        self.buckets = plan.buckets
        self._views: list[NDArray[Any]] = []
        self._slots = {slot.index: slot for bucket in plan.buckets for slot in bucket.slots}
        self.bucket_of = {slot.index: k for k, bucket in enumerate(plan.buckets) for slot in bucket.slots}
        self.members = [[slot.index for slot in b.slots] for b in plan.buckets]
        self.indices = [np.array(members, np.intp) for members in self.members]
        self._flags = [self._flag_view(bucket) for bucket in plan.buckets]
        scale, title = self._options.scale, self._options.name
        self._raised = [flag_bits(bucket.dtype, scale, self._size) for bucket in plan.buckets]
        self.arrays = [
            self._as_array(self._arena[b.offset : b.offset + b.nbytes], b.dtype) for b in plan.buckets
        ]
        self.names = [_bucket_name(title, k, b, self._specs) for k, b in enumerate(plan.buckets)]

    def slot(self, index: int) -> Bytes:
        """Memory of one gradient. Shape (nbytes,)."""
        slot = self._slots[index]
        return self._arena[slot.offset : slot.offset + slot.nbytes]

    @property
    def views(self) -> list[NDArray[Any]]:
        """The slots as arrays of the parameters' shapes; the same ones until the plan changes."""
        if not self._views:
            self._views = [
                self.slot(index).view(np.dtype(spec.dtype)).reshape(spec.shape)
                for index, spec in enumerate(self._specs)
            ]
        return self._views

    def pieces(self, number: int, elsewhere: Mapping[int, Gradient]) -> Pieces | None:
        """A bucket of which some gradients lie elsewhere; None: all are in their slots.

        The pieces are as long together as the bucket, and in its order.
        """
        bucket = self.buckets[number]
        arena = self._address
        owners: list[object] = [self]
        addresses: list[int] = []
        lengths: list[int] = []
        devices: dict[int, Gradient] = {}  # by the number of the piece
        done = bucket.offset
        for slot in bucket.slots:
            buffer = elsewhere.get(slot.index)
            if buffer is None:
                continue
            address, owner, device, _ = buffer
            owners.append(owner)
            offset, nbytes = slot.offset, slot.nbytes
            if nbytes == 0:
                continue
            if offset > done:
                addresses.append(arena + done)
                lengths.append(offset - done)
            if device >= 0:
                devices[len(addresses)] = buffer
            addresses.append(address)
            lengths.append(nbytes)
            done = offset + nbytes
        if len(owners) == 1:
            return None
        addresses.append(arena + done)  # the flags at least
        lengths.append(bucket.offset + bucket.nbytes - done)
        pieces = Pieces(bucket.dtype, addresses, lengths, owners)
        if not devices:
            return pieces
        buffers = [devices.get(number, IN_SLOT) for number in range(len(addresses))]
        return pieces._replace(
            devices=[buffer.device for buffer in buffers], streams=[buffer.stream for buffer in buffers]
        )

    def read(self, index: int, elsewhere: Mapping[int, Gradient]) -> Bytes:
        """A gradient of the round, wherever it lies: its memory, or a copy of that of a device."""
        where = elsewhere.get(index)
        if where is None:
            return self.slot(index)
        nbytes = self._specs[index].nbytes
        if where.device < 0:
            return bytes_at(where.address, nbytes)
        return _core.copy_from_device(where.address, nbytes, where.device, where.stream)

    def write(self, index: int, elsewhere: Mapping[int, Gradient], data: Bytes) -> None:
        """Overwrite a gradient of the round, wherever it lies."""
        where = elsewhere.get(index)
        if where is None or where.device < 0:
            self.read(index, elsewhere)[:] = data
        else:
            _core.copy_to_device(where.address, data, where.device, where.stream)

    def raise_flags(self, number: int, produced: Sequence[int], active: bool) -> None:
        """Set this rank's flags of a bucket before it leaves.

        Args:
            number: Number of the bucket.
            produced: Per slot of the bucket 1 or 0: this rank has a new gradient.
            active: This rank has data.
        """
        flags, raised = self._flags[number], self._raised[number]
        flags[:] = 0
        count = len(produced)
        flags[:count] = raised if all(produced) else np.where(produced, flags.dtype.type(raised), 0)
        if active:
            flags[len(produced) + self._rank] = raised

    def read_flags(self, number: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Flags of all ranks after the reduction: (per slot: any rank produced it, per rank: it has data)."""
        flags = self._flags[number] << 1 != 0  # a negative scale makes -0.0 of zeros
        slots = len(self.buckets[number].slots)
        return flags[:slots], flags[slots:]

    def _flag_view(self, bucket: Bucket) -> NDArray[Any]:
        """Flags as unsigned integers of the element's width: their bits are set and tested here."""
        data = self._arena[bucket.flags_offset : bucket.offset + bucket.nbytes]
        return data.view(np.dtype(f"u{itemsize(bucket.dtype)}"))


def _bucket_name(title: str, number: int, bucket: Bucket, specs: Sequence[ParameterSpec]) -> str:
    return f"{title}[{number}]: {first_and_more([specs[slot.index].name for slot in bucket.slots])}"
