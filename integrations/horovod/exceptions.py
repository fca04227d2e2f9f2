"""What Horovod raises where an operation fails on all ranks."""

from __future__ import annotations

__all__ = ["HorovodInternalError"]


class HorovodInternalError(RuntimeError):
    """An operation failed on all ranks: they asked for different things, or a rank is lost or late.

    After a mismatch the job goes on. The error of multiring that it stands for is its `__cause__`, if there
    is one.
    """
