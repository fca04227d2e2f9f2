"""Batch normalisation over the batches of all ranks, by Horovod's name."""

from __future__ import annotations

from typing import Any

import multiring
from multiring import Communicator
from multiring import torch as adapter
from multiring.horovod import basics

__all__ = ["SyncBatchNorm"]


class _Job:
    """The ranks of the job that there is when the layer is used: those of hvd.init(comm=[...]), too."""

    def parent(self) -> Communicator:
        return basics.communicator() or multiring.world()


class SyncBatchNorm(adapter.SyncBatchNorm):
    """`multiring.torch.SyncBatchNorm` of all ranks of the job.

    A rank in its forward or backward pass takes no part in the recovery from a mismatch: before it,
    synchronize the handles of a process set's operations.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        """Like `torch.nn.BatchNorm2d`."""
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self._group: Any = _Job()
