"""State and metrics of NumPy models over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeVar

from multiring import metrics as shared_metrics
from multiring.derived import resolve
from multiring.state.broadcast import broadcast_arrays
from multiring.state.buffer_sync import sync_arrays
from multiring.types import BufferMode
from numpy.typing import NDArray

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["average_metrics", "batch_weight", "broadcast_object", "broadcast_parameters", "sync_buffers"]

T = TypeVar("T")


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
    comm = resolve(comm)
    broadcast_arrays(comm, parameters, root)


def broadcast_object(obj: T, root: int = 0, comm: Communicator | None = None) -> T:
    """Return `root`'s object on every rank; it has to be picklable. Collective."""
    comm = resolve(comm)
    received: T = comm.broadcast_object(obj, root)
    return received


def average_metrics(
    metrics: Mapping[str, SupportsFloat], count: float, comm: Communicator | None = None
) -> dict[str, float]:
    """Average metrics over ranks, weighted by `count` samples; see `multiring.metrics.average_metrics`."""
    return shared_metrics.average_metrics(resolve(comm), metrics, count)


def batch_weight(count: float, comm: Communicator | None = None) -> float:
    """What to multiply the mean loss, or its gradients, with where batches differ in size over ranks.
    Collective; see `multiring.metrics.batch_weight`."""
    return shared_metrics.batch_weight(resolve(comm), count)


def sync_buffers(
    arrays: Mapping[str, NDArray[Any]], mode: BufferMode = "broadcast", comm: Communicator | None = None
) -> None:
    """Make arrays that each rank has updated from its own batch alone the same on all ranks, in place; see
    `multiring.state.buffer_sync.sync_arrays`. Collective unless `mode` is "local"."""
    sync_arrays(resolve(comm), arrays, mode)
