"""What the driver needs from a framework: one training step and its state, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from multiring.models.loader import Batch

__all__ = ["Probe", "Sums", "Trainer", "hash_arrays"]


@dataclass(frozen=True)
class Sums:
    """Sums over samples, so that they add up exactly over batches and ranks however uneven these are.

    Attributes:
        loss: Sum of the samples' losses.
        correct: Samples whose highest score is the right class.
        count: Samples.
    """

    loss: float = 0.0
    correct: int = 0
    count: int = 0

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.loss + other.loss, self.correct + other.correct, self.count + other.count)

    @property
    def mean_loss(self) -> float:
        """Mean loss per sample; 0 without samples."""
        return self.loss / self.count if self.count else 0.0

    @property
    def accuracy(self) -> float:
        """Share of right answers, 0 to 1; 0 without samples."""
        return self.correct / self.count if self.count else 0.0


@dataclass(frozen=True)
class Probe:
    """What a network makes of a batch, for comparison with other frameworks.

    Attributes:
        scores: Class scores in training mode, `(n, classes)`.
        gradients: Of the mean loss over the batch, by the names and in the shapes of the specification
            (channels first).
    """

    scores: npt.NDArray[Any]
    gradients: dict[str, npt.NDArray[Any]]


class Trainer(Protocol):
    """One rank's network and optimizer in one framework.

    Made with the same specification, weights and recipe on every rank; every method but `state` and
    `fingerprint` is called by all ranks in the same order.
    """

    def step(self, batch: Batch, lr: float) -> Sums:
        """Train on one global batch, of which this rank holds a part.

        The gradient is that of the mean loss over the whole global batch, also where ranks hold unequal
        parts or this one holds none.

        Args:
            batch: This rank's part.
            lr: Learning rate of this step.

        Returns:
            Sums over this rank's part.
        """

    def evaluate(self, batch: Batch) -> Sums:
        """Score a batch with the running statistics; no communication, nothing is changed."""

    def probe(self, batch: Batch) -> Probe:
        """Forward in training mode and backward over this rank's batch, with nothing changed (running
        statistics neither). Only for trainers of a single rank."""

    def synchronise(self) -> None:
        """Make state that ranks gather separately equal on all of them (running statistics); called before
        every evaluation and checkpoint."""

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Copies of everything that a continuation needs, by name: `model/...`, `optimizer/...`,
        `rng/...`."""

    def load_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take over what `state` returned; raises CheckpointError where it does not fit."""

    def fingerprint(self) -> str:
        """Hash of the bits of all state that has to be equal on every rank after every step."""

    def close(self) -> None:
        """Let go of what the trainer holds of the communicator; the last call."""


def hash_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of arrays, in the order of their names."""
    import hashlib

    digest = hashlib.sha256()
    for name in sorted(arrays):
        value = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {value.dtype.str} {value.shape}\n".encode())
        digest.update(value.data)
    return digest.hexdigest()
