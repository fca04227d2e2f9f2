"""State of NumPy models over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from multiring.derived import resolve
from multiring.state.broadcast import broadcast_arrays
from multiring.state.buffer_sync import sync_arrays
from multiring.types import BufferMode
from numpy.typing import NDArray

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["broadcast_parameters", "sync_buffers"]


def broadcast_parameters(
    parameters: Mapping[str, NDArray[Any]], root: int = 0, comm: Communicator | None = None
) -> None:
    """Overwrite the arrays of all ranks with those of `root`. Collective.

    Args:
        parameters: Writable arrays of any dtype and shape, by name, in the same order on every rank.
        root: Rank whose values everyone gets.
        comm: Ranks that take part; the world by default.

    Raises:
        UsageError: `root` is not a rank.
        MismatchError: The ranks pass different names, shapes or dtypes.
    """
    broadcast_arrays(resolve(comm), parameters, root)


def sync_buffers(
    arrays: Mapping[str, NDArray[Any]], mode: BufferMode = "broadcast", comm: Communicator | None = None
) -> None:
    """Make arrays that each rank has updated from its own batch alone the same on all ranks, in place; see
    `multiring.state.buffer_sync.sync_arrays`. Collective unless `mode` is "local"."""
    sync_arrays(resolve(comm), arrays, mode)
