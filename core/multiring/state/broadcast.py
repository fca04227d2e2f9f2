"""State from one rank to all: small arrays together in large broadcasts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from multiring.arrays import contiguous, joined, without_mask
from multiring.communicator import Communicator
from multiring.derived import resolve
from multiring.errors import UsageError
from multiring.gradients.bucketing import BUCKET_BYTES, first_and_more
from multiring.gradients.model_check import ADVICE, check_same
from multiring.reductions import explain_arguments

__all__ = ["StateBuffer", "broadcast_arrays", "broadcast_object", "broadcast_state", "check_root"]

T = TypeVar("T")


@dataclass(frozen=True)
class StateBuffer:
    """One array of the state.

    Attributes:
        name: Unique name, the same on every rank.
        data: Its memory as writable bytes, shape (nbytes,), of NumPy, or on a device as that of all others.
            Bytes, so that every dtype travels alike.
        description: Dtype and shape, compared across ranks.
    """

    name: str
    data: Any
    description: str = ""


@explain_arguments
def broadcast_object(obj: T, root: int = 0, comm: Communicator | None = None) -> T:
    """Return `root`'s object on every rank; it has to be picklable. Collective."""
    received: T = resolve(comm).broadcast_object(obj, root)
    return received


def check_root(comm: Communicator, root: int) -> None:
    """Raise UsageError unless `root` is a rank of `comm`."""
    if not 0 <= root < comm.size:
        raise UsageError(f"rank {comm.rank}: root is {root}; pass a rank from 0 to {comm.size - 1}")


def broadcast_state(
    comm: Communicator,
    buffers: Sequence[StateBuffer],
    root: int = 0,
    pack_bytes: int = BUCKET_BYTES,
    *,
    advice: str = ADVICE,
) -> None:
    """Overwrite the buffers of all ranks with those of `root`. Collective.

    Buffers of `pack_bytes` or more travel from where they are; smaller ones are packed together. `advice` is
    what to do about different names, for the error.

    Raises:
        UsageError: `root` is not a rank.
        MismatchError: The ranks pass different names, sizes or descriptions.
    """
    check_root(comm, root)
    if comm.size == 1:
        return
    entries = [(item.name, f"{item.description} {item.data.nbytes} bytes") for item in buffers]
    check_same(comm, entries, "state to broadcast", advice=advice)
    for number, pack in enumerate(_packs(buffers, pack_bytes)):
        name = f"state[{number}]: {first_and_more([item.name for item in pack])}"
        if len(pack) == 1:
            comm.broadcast(pack[0].data, root=root, out=pack[0].data, name=name)
        else:
            _broadcast_packed(comm, pack, root, name)


def broadcast_arrays(
    comm: Communicator, arrays: Mapping[str, Any], root: int = 0, *, advice: str = ADVICE
) -> None:
    """Overwrite arrays of all ranks, of NumPy or CuPy, with those of `root`. Collective.

    Args:
        comm: Ranks that take part.
        arrays: Writable arrays of any dtype, shape and strides, by name, in the same order on every rank; all
            in host memory or all on one device.
        root: Rank whose values everyone gets.
        advice: What to do about different names, for the error.

    Raises:
        UsageError: `root` is not a rank, or an array is masked.
        MismatchError: The ranks pass different names, shapes or dtypes.
    """
    flat = {name: contiguous(without_mask(array, f"'{name}'")) for name, array in arrays.items()}
    buffers = [
        StateBuffer(name, array.reshape(-1).view(np.uint8), f"{array.dtype} {array.shape}")
        for name, array in flat.items()
    ]
    broadcast_state(comm, buffers, root, advice=advice)
    for name, array in flat.items():
        if array is not arrays[name]:
            arrays[name][...] = array


def _packs(buffers: Sequence[StateBuffer], limit: int) -> Iterator[list[StateBuffer]]:
    pack: list[StateBuffer] = []
    filled = 0
    for item in buffers:
        if item.data.nbytes == 0:
            continue
        if pack and filled + item.data.nbytes > limit:
            yield pack
            pack, filled = [], 0
        pack.append(item)
        filled += item.data.nbytes
    if pack:
        yield pack


def _broadcast_packed(comm: Communicator, pack: Sequence[StateBuffer], root: int, name: str) -> None:
    packed = joined([item.data for item in pack])
    comm.broadcast(packed, root=root, out=packed, name=name)
    if comm.rank != root:
        ends = np.cumsum([item.data.nbytes for item in pack])
        for item, end in zip(pack, ends, strict=True):
            item.data[:] = packed[end - item.data.nbytes : end]
