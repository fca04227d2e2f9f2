"""The buffers of a model (running statistics, counters), made the same on all ranks after a training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from multiring.errors import UsageError
from multiring.gradients.bucketing import first_and_more
from multiring.types import BufferMode

if TYPE_CHECKING:
    from multiring.communicator import Communicator

__all__ = ["check_mode", "sync_arrays"]

Arrays = Mapping[str, NDArray[Any]]

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
        arrays: Writable arrays by name, the same names, shapes and dtypes in the same order on every rank.
        mode: What to do, see `BufferMode`.
        active: Per rank, whether it has data and its arrays count; all of them by default.

    Raises:
        UsageError: There is no such mode.
        MismatchError: The ranks pass different numbers of bytes.
    """
    check_mode(comm.rank, mode)
    counted = [True] * comm.size if active is None else [bool(one) for one in active]
    if comm.size == 1 or mode == "local" or not any(counted):
        return
    averaged = {name: a for name, a in arrays.items() if mode == "average" and a.dtype.kind in "fc"}
    others = {name: array for name, array in arrays.items() if name not in averaged}
    if others:
        packed = np.concatenate([_flat(array).view(np.uint8) for array in others.values()])
        comm.broadcast(packed, root=counted.index(True), out=packed, name=_title(others))
        _unpack(packed, others)
    for dtype in sorted({array.dtype for array in averaged.values()}, key=str):
        part = {name: array for name, array in averaged.items() if array.dtype == dtype}
        packed = np.concatenate([_flat(array) for array in part.values()])
        packed = packed.view(packed.real.dtype)
        if not counted[comm.rank]:
            packed[:] = 0
        comm.allreduce(packed, out=packed, name=_title(part), postscale=1 / sum(counted))
        _unpack(packed, part)


def _flat(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array).reshape(-1)


def _unpack(packed: NDArray[Any], arrays: Arrays) -> None:
    data, start = packed.view(np.uint8), 0
    for array in arrays.values():
        array[...] = data[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        start += array.nbytes


def _title(arrays: Arrays) -> str:
    return f"buffers: {first_and_more(list(arrays))}"
