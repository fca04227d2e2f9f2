"""Frameworks that are Torch under another name, each with one thing wrong. Loaded by the ranks."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from multiring.models.data.loader import Batch
from multiring.models.trainers.train_torch import TorchTrainer
from multiring.models.trainers.trainer import Probe, Sums


class Wrong(TorchTrainer):
    """One gradient is off by a thousandth; several ranks count only their own samples, so that their
    gradients are twice as large; and rank 1 holds other bits."""

    def probe(self, batch: Batch) -> Probe:
        probe = super().probe(batch)
        off = probe.gradients["head.dense.bias"] * 1.001
        return Probe(probe.scores, probe.gradients | {"head.dense.bias": off})

    def step(self, batch: Batch, lr: float) -> Sums:
        return super().step(Batch(batch.images, batch.labels, max(1, len(batch.labels))), lr)

    def fingerprint(self) -> str:
        return super().fingerprint() + ("astray" if self._comm.rank == 1 else "")


class OnlyFloat32(TorchTrainer):
    """It has no float64."""

    def __init__(self, *args: Any, dtype: str = "float32", **options: Any) -> None:
        if dtype != "float32":
            raise NotImplementedError("Other computes in float32 only")
        super().__init__(*args, dtype=dtype, **options)


class Raising(TorchTrainer):
    """One rank of several meets an error in the first step on images of 8 x 8; larger ones are all right."""

    def step(self, batch: Batch, lr: float) -> Sums:
        if self._comm.rank == self._comm.size - 1 > 0 and batch.images.shape[-1] == 8:
            raise ValueError("the batch is upside down")
        return super().step(batch, lr)


class Killed(TorchTrainer):
    """The kernel kills one rank of several in its first step."""

    def step(self, batch: Batch, lr: float) -> Sums:
        if self._comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(batch, lr)


class Hanging(TorchTrainer):
    """It never comes back from the test images, and signals do not help."""

    def evaluate(self, batch: Batch) -> Sums:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1000)
