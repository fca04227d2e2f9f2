"""State from one rank to all, and metrics over all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeVar

import numpy as np

import multiring
from multiring import metrics as shared_metrics
from multiring.state_sync import StateBuffer, broadcast_state, check_root
from multiring.tensorflow.variables import named_variables, to_numpy

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["average_metrics", "broadcast_object", "broadcast_variables"]

T = TypeVar("T")


def broadcast_variables(variables: Any, root: int = 0, comm: Communicator | None = None) -> None:
    """Overwrite variables of all ranks with those of `root`. Collective; not inside `tf.function`.

    Args:
        variables: A model, an optimizer, a mapping, or a sequence of variables, of TensorFlow or of Keras on
            any backend, of any dtypes; in the same order on every rank. Of a model its `weights`: the seeds
            of its random layers stay as they are.
        root: Rank whose values everyone gets.
        comm: Ranks that take part; the world by default.

    Raises:
        UsageError: `root` is not a rank.
        MismatchError: The ranks pass different names, shapes or dtypes.
    """
    comm = multiring.world() if comm is None else comm
    check_root(comm, root)
    if comm.size == 1:
        return
    found = named_variables(variables)
    arrays = {name: to_numpy(variable) for name, variable in found.items()}
    buffers = [
        StateBuffer(name, array.reshape(-1).view(np.uint8), f"{array.dtype} {array.shape}")
        for name, array in arrays.items()
    ]
    broadcast_state(comm, buffers, root)
    if comm.rank != root:
        for name, variable in found.items():
            variable.assign(arrays[name])


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
