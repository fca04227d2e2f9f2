"""What torch.distributed asks of the backend that a process group has for the devices of its tensors."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

if TYPE_CHECKING:
    from multiring.torch_distributed.group_base import GroupBase

__all__ = ["GroupBackend"]


class GroupBackend:
    """What `ProcessGroup._get_backend` returns: what torch may ask, and the group's own methods.

    Args:
        group: The group.
        timeout: Its deadline.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False

    def __init__(self, group: GroupBase, timeout: timedelta) -> None:
        self._group = group
        self._timeout = timeout

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """`torch.distributed.distributed_c10d._set_pg_timeout` passes over what is no backend of torch's own,
        and asks nothing else of Gloo's than `_set_default_timeout`."""
        return dist.ProcessGroupGloo if dist.is_gloo_available() else GroupBackend

    @property
    def options(self) -> Any:
        """Name and deadline."""
        return Backend.Options(self._group.name(), self._timeout)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether tensors may be allocated by `allocate_tensor`."""
        return False

    def allocate_tensor(self, *size: Any, **options: Any) -> NoReturn:
        """Not supported."""
        raise NotImplementedError("the backend 'multiring' allocates no tensors: use torch.empty()")

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)

    def __getattr__(self, name: str) -> Any:
        if name == "_group":  # of a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self._group, name)

    def __repr__(self) -> str:
        return f"<backend of {self._group!r}>"
