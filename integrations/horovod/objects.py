"""Objects of Python from one rank to all, and from all to all."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.horovod.exceptions import HorovodInternalError
from multiring.horovod.host_calls import Asked, start
from multiring.horovod.process_sets import ProcessSet, global_process_set

try:
    import cloudpickle as pickling
except ModuleNotFoundError:  # it pickles functions and classes of the script itself
    import pickle as pickling

__all__ = ["allgather_object", "broadcast_object"]

Array = NDArray[Any]


def _bytes_of(obj: Any) -> tuple[Array, int, Exception | None]:
    """The pickled object and its length; -1, and what was raised, if it cannot be pickled."""
    try:
        data = np.frombuffer(pickling.dumps(obj), np.uint8)
    except Exception as error:
        return np.empty(0, np.uint8), -1, error
    return data, data.size, None


def _call(asked: Asked, array: Array, name: str | None, part: str, process_set: ProcessSet) -> Array:
    full = f"{name}.{part}" if name else process_set.operations().auto_name()
    result: Array = start(asked, full, [array], process_set).wait()[0]
    return result


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The object of rank `root_rank`, pickled (by cloudpickle where it is installed).

    The ranks of the job are trusted.

    Raises:
        HorovodInternalError: The root could not pickle it; what pickling raised is raised there.
    """
    is_root = process_set.operations().rank == process_set.root(root_rank)
    data, length, failure = _bytes_of(obj if is_root else None)
    asked = Asked("broadcast", root=root_rank)
    sent = int(_call(asked, np.array([length]), name, "sz", process_set)[0])
    if is_root and failure is not None:
        raise failure
    if sent < 0:
        raise HorovodInternalError(f"rank {root_rank} could not pickle the object '{name}'")
    received = _call(asked, data if is_root else np.empty(sent, np.uint8), name, "t", process_set)
    return obj if is_root else pickling.loads(received)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks, in the order of the ranks, pickled as there.

    Raises:
        HorovodInternalError: A rank could not pickle its own; what pickling raised is raised there.
    """
    data, length, failure = _bytes_of(obj)
    asked = Asked("allgather")
    lengths = _call(asked, np.array([length]), name, "sz", process_set).tolist()
    if failure is not None:
        raise failure
    if min(lengths) < 0:
        raise HorovodInternalError(
            f"rank {lengths.index(-1)} of the set could not pickle its object '{name}'"
        )
    joined = _call(asked, data, name, "t", process_set)
    return [pickling.loads(part) for part in np.split(joined, np.cumsum(lengths)[:-1])]
