"""What torch 2.6 does otherwise than later versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d
from torch.torch_version import TorchVersion

if TYPE_CHECKING:
    from multiring.torch_distributed.work import GroupWork

__all__ = ["WORK_IS_COLLECTED", "kept_by_torch", "shut_down_when_destroyed"]

# The Python part of a work that only C++ still holds is collected, and C++ waits for ever.
WORK_IS_COLLECTED = TorchVersion(torch.__version__) < "2.7"


def kept_by_torch(work: GroupWork) -> Any:
    """A work that C++ can hold alone, for operations on several tensors: it waits for each of them."""
    return _distributed_c10d._create_work_from_future(work.get_future())  # type: ignore[attr-defined]


def shut_down_when_destroyed(kind: type[Any]) -> None:
    """Has `destroy_process_group` call `shutdown` of the groups of a class, as later versions do of all.

    Args:
        kind: Their class.
    """
    theirs = distributed_c10d._shutdown_backend  # type: ignore[attr-defined]

    def shut_down(group: Any) -> None:
        if isinstance(group, kind):
            group.shutdown()
        else:
            theirs(group)

    distributed_c10d._shutdown_backend = shut_down  # type: ignore[attr-defined]
