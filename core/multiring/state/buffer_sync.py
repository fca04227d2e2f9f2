"""The buffers of a model (running statistics, counters), made the same on all ranks after a training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from multiring.arrays import contiguous, joined, without_mask
from multiring.errors import UsageError
from multiring.gradients.bucketing import first_and_more
from multiring.types import BufferMode

if TYPE_CHECKING:
    from multiring.communicator import Communicator

__all__ = ["check_mode", "sync_arrays"]

Arrays = Mapping[str, Any]

_MODES = get_args(BufferMode)


def check_mode(rank: int, mode: BufferMode) -> None:
    """Raise UsageError unless `mode` is one."""
    if mode not in _MODES:
        raise UsageError(f"rank {rank}: buffers is {mode!r}; accepted: {', '.join(_MODES)}")


def sync_arrays(
    comm: Communicator, arrays: Arrays, mode: BufferMode = "broadcast", active: Sequence[bool] | None = None
) -> None:
    """Make the arrays of all ranks the same, in place. Collective unless `mode` is "local".

    Args:
        comm: Ranks that train together.
        arrays: Writable arrays by name, the same names, shapes and dtypes in the same order on every rank; of
            one library that has NumPy's names, all on the host or all on one device.
        mode: What to do, see `BufferMode`.
        active: Per rank, whether it has data and its arrays count; all of them by default.

    Raises:
        UsageError: There is no such mode, or an array is masked.
        MismatchError: The ranks pass different numbers of bytes.
    """
    check_mode(comm.rank, mode)
    for name, array in arrays.items():
        without_mask(array, f"'{name}'")
    counted = [True] * comm.size if active is None else [bool(one) for one in active]
    if comm.size == 1 or mode == "local" or not any(counted):
        return
    averaged = {name: a for name, a in arrays.items() if mode == "average" and a.dtype.kind in "fc"}
    others = {name: array for name, array in arrays.items() if name not in averaged}
    if others:
        packed = joined([contiguous(array).reshape(-1).view(np.uint8) for array in others.values()])
        comm.broadcast(packed, root=counted.index(True), out=packed, name=_title(others))
        _unpack(packed, others)
    for dtype in sorted({array.dtype for array in averaged.values()}, key=str):
        part = {name: array for name, array in averaged.items() if array.dtype == dtype}
        packed = joined(list(part.values()))
        packed = packed.view(packed.real.dtype)
        if not counted[comm.rank]:
            packed[:] = 0
        comm.allreduce(packed, out=packed, name=_title(part), postscale=1 / sum(counted))
        _unpack(packed, part)


def _unpack(packed: Any, arrays: Arrays) -> None:
    data, start = packed.view(np.uint8), 0
    for array in arrays.values():
        part = data[start : start + array.nbytes]
        if start % array.itemsize:  # a device reads elements at multiples of their size only
            part = part.copy()
        array[...] = part.view(array.dtype).reshape(array.shape)
        start += array.nbytes


def _title(arrays: Arrays) -> str:
    return f"buffers: {first_and_more(list(arrays))}"
