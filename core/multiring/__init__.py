"""Synchronous data-parallel training for every deep-learning framework over one native allreduce core.

    import multiring

    comm = multiring.init()
    total = comm.allreduce(array)

Start it on several processes with `multiring run -np 4 python train.py`. Adapters: `multiring.torch` and so
on, each imported on its own.
"""

from importlib.metadata import version as _version

from multiring.communicator import Communicator
from multiring.errors import (
    AbortedError,
    InternalError,
    MismatchError,
    MultiringError,
    PeerLostError,
    TimeoutError,
    UsageError,
)
from multiring.work import Work
from multiring.world import (
    cross_rank,
    cross_size,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    world,
)

__version__ = _version("multiring")

__all__ = [
    "AbortedError",
    "Communicator",
    "InternalError",
    "MismatchError",
    "MultiringError",
    "PeerLostError",
    "TimeoutError",
    "UsageError",
    "Work",
    "__version__",
    "cross_rank",
    "cross_size",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
    "world",
]
