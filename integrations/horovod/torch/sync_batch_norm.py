"""Batch normalisation over the batches of all ranks, by Horovod's name."""

from __future__ import annotations

from multiring import torch as adapter

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(adapter.SyncBatchNorm):
    """`multiring.torch.SyncBatchNorm` of all ranks of the job."""

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
