"""How a network is trained: learning rate and optimizer settings as pure functions of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from multiring.errors import UsageError

__all__ = ["Decay", "Recipe"]

Decay = Literal["cosine", "step", "constant"]

# The step decay lowers the learning rate at epochs 30, 60 and 80 of 90, or in proportion.
STEP_MILESTONES = (30, 60, 80)
STEP_PERIOD = 90


@dataclass(frozen=True)
class Recipe:
    """Stochastic gradient descent with a learning rate that follows the global batch.

    Attributes:
        base_lr: Learning rate for a global batch of `reference_batch` samples.
        global_batch: Samples per step over all ranks.
        total_steps: Steps of the whole training.
        warmup_steps: Steps over which the rate rises linearly to its peak.
        decay: "cosine" falls to 0 at the end, "step" divides by 10 at 1/3, 2/3 and 8/9, "constant" stays.
        momentum: Momentum of the optimizer.
        nesterov: Whether the momentum looks ahead.
        weight_decay: L2 penalty on convolution and dense weights; never on scales, shifts and biases.
        reference_batch: Global batch that `base_lr` is meant for.
    """

    base_lr: float
    global_batch: int
    total_steps: int
    warmup_steps: int = 0
    decay: Decay = "cosine"
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 1e-4
    reference_batch: int = 256

    def __post_init__(self) -> None:
        if self.decay not in ("cosine", "step", "constant"):
            raise UsageError(f"unknown decay {self.decay!r}; choose cosine, step or constant")
        if self.base_lr < 0 or self.weight_decay < 0 or not 0 <= self.momentum < 1:
            raise UsageError(
                "learning rate and weight decay must not be negative, momentum must be in [0, 1)"
            )
        if self.nesterov and self.momentum == 0:
            raise UsageError("nesterov needs a momentum above 0")
        if min(self.global_batch, self.reference_batch, self.total_steps) < 1 or self.warmup_steps < 0:
            raise UsageError("batches and steps must be at least 1, warm-up steps at least 0")

    @property
    def peak_lr(self) -> float:
        """Learning rate after the warm-up: linear in the global batch."""
        return self.base_lr * self.global_batch / self.reference_batch

    def lr(self, step: int) -> float:
        """Learning rate of a step, counted from 0 over the whole training."""
        if step < self.warmup_steps:
            return self.peak_lr * ((step + 1) / self.warmup_steps)
        span = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        if self.decay == "cosine":
            return self.peak_lr * 0.5 * (1.0 + math.cos(math.pi * progress))
        if self.decay == "step":
            passed = sum(step * STEP_PERIOD >= milestone * self.total_steps for milestone in STEP_MILESTONES)
            return self.peak_lr * 0.1**passed
        return self.peak_lr
