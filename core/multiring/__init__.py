"""Synchronous data-parallel training for every deep-learning framework over one native allreduce core.

    import multiring

    comm = multiring.init()
    total = comm.allreduce(array)

Start it on several processes with `multiring run -np 4 python train.py`. Adapters: `multiring.torch` and so
on, each imported on its own.
"""

from typing import TYPE_CHECKING

from multiring.errors import (
    AbortedError,
    InternalError,
    MismatchError,
    MultiringError,
    PeerLostError,
    RankError,
    TimeoutError,
    UsageError,
)
from multiring.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from multiring.commands.functions.caller import launch, run
    from multiring.communicator import Communicator
    from multiring.gradients.compression import TopK
    from multiring.gradients.options import ReducerOptions
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
    from multiring.metrics import batch_weights, stop_together
    from multiring.named_queue import NamedQueue
    from multiring.version import __version__
    from multiring.work import Work

# Taken from their modules on first use: the launcher, and `multiring doctor`, which has to work where the
# native library does not load, need neither it nor NumPy, and the version takes 40 ms to look up.
__getattr__, __dir__ = _lazy_names(
    __name__,
    {
        "Communicator": ".communicator",
        "NamedQueue": ".named_queue",
        "ReducerOptions": ".gradients.options",
        "TopK": ".gradients.compression",
        "Work": ".work",
        "__version__": ".version",
        "batch_weights": ".metrics",
        "cross_rank": ".initialization",
        "cross_size": ".initialization",
        "init": ".initialization",
        "is_initialized": ".initialization",
        "launch": ".commands.functions.caller",
        "local_rank": ".initialization",
        "local_size": ".initialization",
        "rank": ".initialization",
        "run": ".commands.functions.caller",
        "shutdown": ".initialization",
        "size": ".initialization",
        "stop_together": ".metrics",
        "world": ".initialization",
        # Adapters and integrations that are used without an import of their own.
        "caffe": ".caffe",
        "chainer": ".chainer",
        "horovod": ".horovod",
        "jax": ".jax",
        "numpy": ".numpy",
        "pytensor": ".pytensor",
        "ray": ".ray",
        "tensorflow": ".tensorflow",
        "torch": ".torch",
    },
)

__all__ = [
    "AbortedError",
    "Communicator",
    "InternalError",
    "MismatchError",
    "MultiringError",
    "NamedQueue",
    "PeerLostError",
    "RankError",
    "ReducerOptions",
    "TimeoutError",
    "TopK",
    "UsageError",
    "Work",
    "__version__",
    "batch_weights",
    "cross_rank",
    "cross_size",
    "init",
    "is_initialized",
    "launch",
    "local_rank",
    "local_size",
    "rank",
    "run",
    "shutdown",
    "size",
    "stop_together",
    "world",
]
