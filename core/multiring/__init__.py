"""Synchronous data-parallel training for every deep-learning framework over one native allreduce core.

    import multiring

    comm = multiring.init()
    total = comm.allreduce(array)

Start it on several processes with `multiring run -np 4 python train.py`. Adapters: `multiring.torch` and so
on, each imported on its own.
"""

import sys as _sys
from importlib import import_module as _import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

from multiring.errors import (
    AbortedError,
    InternalError,
    MismatchError,
    MultiringError,
    PeerLostError,
    TimeoutError,
    UsageError,
)

if TYPE_CHECKING:
    from multiring.communicator import Communicator
    from multiring.gradients.compression import TopK
    from multiring.initialization import (
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
    from multiring.named_queue import NamedQueue
    from multiring.work import Work

__version__ = _version("multiring")

# Taken from their modules on first use: the launcher, and `multiring doctor`, which has to work where the
# native library does not load, need neither it nor NumPy.
_HOMES = {
    "Communicator": "multiring.communicator",
    "NamedQueue": "multiring.named_queue",
    "TopK": "multiring.gradients.compression",
    "Work": "multiring.work",
    "cross_rank": "multiring.initialization",
    "cross_size": "multiring.initialization",
    "init": "multiring.initialization",
    "is_initialized": "multiring.initialization",
    "local_rank": "multiring.initialization",
    "local_size": "multiring.initialization",
    "rank": "multiring.initialization",
    "shutdown": "multiring.initialization",
    "size": "multiring.initialization",
    "world": "multiring.initialization",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        # Python suggests similar names of the module that the error names.
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}", name=name, obj=_sys.modules[__name__]
        )
    value = getattr(_import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AbortedError",
    "Communicator",
    "InternalError",
    "MismatchError",
    "MultiringError",
    "NamedQueue",
    "PeerLostError",
    "TimeoutError",
    "TopK",
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
