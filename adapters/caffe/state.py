"""State and metrics of nets over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, SupportsFloat, TypeVar

import multiring
from multiring import metrics as shared_metrics
from multiring.caffe.shape import Net, learned_blobs
from multiring.state_sync import broadcast_arrays

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["average_metrics", "broadcast_object", "broadcast_parameters"]

T = TypeVar("T")


def broadcast_parameters(net: Net, root: int = 0, comm: Communicator | None = None) -> None:
    """Overwrite the blobs of all layers, running statistics included, with those of `root`. Collective.

    Args:
        net: A net with `params`, as pycaffe has it; alike on every rank.
        root: Rank whose values everyone gets.
        comm: Ranks that take part; the world by default.

    Raises:
        UsageError: `root` is not a rank.
        MismatchError: The nets have different layers, shapes or dtypes.
    """
    comm = multiring.world() if comm is None else comm
    arrays = {found.name: net.params[found.layer][found.number].data for found in learned_blobs(net)}
    broadcast_arrays(comm, arrays, root)


def broadcast_object(obj: T, root: int = 0, comm: Communicator | None = None) -> T:
    """Return `root`'s object on every rank; it has to be picklable. Collective."""
    comm = multiring.world() if comm is None else comm
    received: T = comm.broadcast_object(obj, root)
    return received


def average_metrics(
    metrics: Mapping[str, SupportsFloat], count: float, comm: Communicator | None = None
) -> dict[str, float]:
    """Average metrics over ranks, weighted by `count` samples; see `multiring.metrics.average_metrics`."""
    return shared_metrics.average_metrics(multiring.world() if comm is None else comm, metrics, count)
