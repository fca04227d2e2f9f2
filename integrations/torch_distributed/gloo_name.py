"""The name "gloo" as one of multiring's, for programs and packages in which no line can be changed.

torch looks for its own backends before it looks for registered ones, so "gloo" cannot be registered. The
function by which torch makes every process group is wrapped instead.
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import TYPE_CHECKING, Any

from multiring.config import AS_GLOO
from multiring.errors import UsageError

if TYPE_CHECKING:
    from multiring.settings import Settings

__all__ = ["as_gloo", "gloo_is_ours", "use_interfaces_of_gloo"]

_GLOO = "gloo"
# The function of torch.distributed.distributed_c10d, and the argument that names the backend.
_MAKER, _ARGUMENT = "_new_process_group_helper", "backend"
_MARK = "_multiring_as_gloo"


def as_gloo() -> None:
    """Make "gloo" mean multiring in this process, and in those that it starts. Idempotent.

    Process groups for which a program asks by "gloo", by no name on a machine without accelerators, or by
    "cpu:gloo,cuda:nccl" are multiring's from now on. `torch.distributed.get_backend` says what was asked for.

    Raises:
        UsageError: A process group is there already, or this torch makes process groups in another way than
            this version of multiring knows.
    """
    # Not at the top: this module is imported while torch is, by what registers the backend.
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        raise UsageError(f"torch {torch.__version__} was built without torch.distributed")
    if gloo_is_ours():
        return
    from torch.distributed import distributed_c10d

    theirs = getattr(distributed_c10d, _MAKER, None)
    if theirs is None or _ARGUMENT not in inspect.signature(theirs).parameters:
        raise UsageError(
            f"torch {torch.__version__} makes process groups in a way that this version of multiring does "
            f"not know: unset {AS_GLOO}, and name the backend 'multiring' in the program"
        )
    if dist.is_initialized():
        raise UsageError("as_gloo() comes too late: call it before torch.distributed.init_process_group()")
    setattr(distributed_c10d, _MAKER, _wrapped(theirs))
    os.environ[AS_GLOO] = "1"


def gloo_is_ours() -> bool:
    """Return whether `as_gloo` was called in this process."""
    from torch.distributed import distributed_c10d

    return hasattr(getattr(distributed_c10d, _MAKER, None), _MARK)


def use_interfaces_of_gloo(settings: Settings) -> None:
    """Let GLOO_SOCKET_IFNAME count where MULTIRING_INTERFACES says nothing."""
    if gloo_is_ours() and not settings.interfaces:
        names = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
        settings.interfaces = [name.strip() for name in names if name.strip()]


def _wrapped(theirs: Any) -> Any:
    signature = inspect.signature(theirs)

    @functools.wraps(theirs)
    def make(*args: Any, **kwargs: Any) -> Any:
        from torch.distributed import distributed_c10d

        from multiring.torch_distributed.group_base import GroupBase

        call = signature.bind(*args, **kwargs)
        asked = call.arguments[_ARGUMENT]
        call.arguments[_ARGUMENT] = _with_our_name(asked)
        group, store = theirs(*call.args, **call.kwargs)
        if call.arguments[_ARGUMENT] is not asked and isinstance(group, GroupBase):
            group.backend_name = _GLOO
            _, *rest = distributed_c10d._world.pg_map[group]
            distributed_c10d._world.pg_map[group] = (asked, *rest)
        return group, store

    setattr(make, _MARK, True)
    return make


def _with_our_name(asked: Any) -> Any:
    """Return the backend to be made for the one that was asked for; the same object if no Gloo is in it."""
    from torch.distributed import distributed_c10d

    from multiring.torch_distributed import BACKEND

    if asked != distributed_c10d.Backend.UNDEFINED and _GLOO not in str(asked):
        return asked
    by_device = dict(distributed_c10d.BackendConfig(asked).get_device_backend_map())
    ours = [device for device, backend in by_device.items() if backend == _GLOO]
    if not ours:
        return asked
    others = {device: backend for device, backend in by_device.items() if backend != _GLOO}
    if not others:
        return distributed_c10d.Backend(BACKEND)
    # Ours comes first, as torch makes no other backend of a group after one that is written in Python.
    pairs = [
        *(f"{device}:{BACKEND}" for device in ours),
        *(f"{kind}:{name}" for kind, name in others.items()),
    ]
    return distributed_c10d.Backend(",".join(pairs))
