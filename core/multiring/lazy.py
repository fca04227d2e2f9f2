"""Names that a package takes from their modules when they are used for the first time."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from types import FrameType
from typing import Any, TypeVar

__all__ = ["lazy_names", "made_once"]

Made = TypeVar("Made")

# What other libraries call it, and what it is here.
_ELSEWHERE = {
    **dict.fromkeys(("Init", "init_process_group", "initialize", "setup"), "multiring.init()"),
    **dict.fromkeys(("destroy_process_group", "finalize"), "multiring.shutdown()"),
    **dict.fromkeys(("get_rank", "process_index"), "multiring.rank()"),
    **dict.fromkeys(("get_world_size", "process_count", "world_size", "num_ranks"), "multiring.size()"),
    **dict.fromkeys(("get_local_rank", "local_process_index"), "multiring.local_rank()"),
}
# Advice for names that only the package of a framework has.
_OF_FRAMEWORKS = {
    **dict.fromkeys(
        ("DistributedDataParallel", "DDP"),
        "write multiring.torch.register_gradient_hooks(model), or keep torch's own and begin by "
        'torch.distributed.init_process_group("multiring")',
    ),
    "DistributedSampler": "write torch.utils.data.DistributedSampler(data, comm.size, comm.rank)",
    "distribute": "write multiring.jax.distribute",
    "shard_dataset": "write multiring.tensorflow.shard_dataset",
    **{
        name: f"each framework has its own, as multiring.torch.{name} (docs/reference)"
        for name in (
            *("DistributedOptimizer", "SyncBatchNorm", "average_metrics", "broadcast_optimizer_state"),
            *("broadcast_parameters", "convert_sync_batchnorm", "register_gradient_hooks"),
        )
    },
}
# Functions of multiring itself, that others have beside those of a framework.
_OF_THE_JOB = (
    *("cross_rank", "cross_size", "init", "is_initialized", "local_rank", "local_size", "rank", "shutdown"),
    *("size", "world"),
)
_COLLECTIVES = (
    *("all_gather", "all_reduce", "allgather", "allreduce", "alltoall", "barrier", "broadcast"),
    *("broadcast_object", "gather", "recv", "reduce_scatter", "scatter", "send", "split"),
)


def made_once(make: Callable[[], Made]) -> Callable[[], Made]:
    """A function that returns what `make` has returned at the first call: one object for all threads, also if
    several call it at once, which functools.cache does not promise."""
    lock, made = threading.RLock(), list[Made]()

    @functools.wraps(make)
    def get() -> Made:
        if not made:
            with lock:
                if not made:
                    made.append(make())
        return made[0]

    return get


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package.

    Args:
        package: Its `__name__`; it has an `__all__`.
        homes: The module of each name, ".x" for one of the package; a name may be that of the module itself.
    """
    module = sys.modules[package]

    def find(name: str) -> Any:
        home = homes.get(name)
        missing = f"module {package!r} has no attribute {name!r}"
        if home is None:
            if meant := _meant(package, name):
                if _is_imported_by(sys._getframe(1)):  # an AttributeError would be replaced
                    raise ImportError(f"cannot import name {name!r} from {package!r}: {meant}", name=package)
                raise AttributeError(f"{missing}: {meant}")
            # Python suggests similar names of the module that the error names.
            raise AttributeError(missing, name=name, obj=module)
        if home != f".{name}":
            value = getattr(import_module(home, package), name)
        else:
            try:
                value = import_module(home, package)
            except ImportError as error:  # hasattr() asks whether it can be had
                raise AttributeError(f"{missing}: {error}") from error
        setattr(module, name, value)
        return value

    return find, lambda: sorted({*vars(module), *module.__all__})


def _is_imported_by(frame: FrameType) -> bool:
    """Whether the frame is at a `from ... import ...`."""
    import opcode

    return frame.f_code.co_code[frame.f_lasti] == opcode.opmap["IMPORT_FROM"]


def _meant(package: str, name: str) -> str:
    """What to write in the place of a name that is not in a package; empty: not known."""
    if package == "multiring" and name in _OF_FRAMEWORKS:
        return _OF_FRAMEWORKS[name]
    if package == "multiring.horovod" and name in (*_OF_THE_JOB, *_COLLECTIVES):
        return "each framework has its own, import multiring.horovod.torch as hvd"
    if name in _ELSEWHERE:
        return f"write {_ELSEWHERE[name]}"
    if name in _OF_THE_JOB:
        return f"it is the same for all frameworks, write multiring.{name}()"
    if name in _COLLECTIVES:
        ours = {"all_gather": "allgather", "all_reduce": "allreduce"}.get(name, name)
        return f"the communicator has it, write comm.{ours}(...) with comm = multiring.init()"
    return ""
