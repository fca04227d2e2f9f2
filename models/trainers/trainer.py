"""What the driver needs from a framework: one training step and its state, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from multiring import Communicator
from multiring.errors import UsageError
from multiring.models.data.loader import Batch
from multiring.models.errors import CheckpointError
from multiring.models.nets.resnet_spec import ResNetSpec
from multiring.models.nets.weights import check_weights, initial_weights
from multiring.models.trainers.recipe import Recipe

__all__ = ["MODEL", "MOMENTUM", "Probe", "Sums", "Trainer", "hash_arrays"]

Array = npt.NDArray[Any]
MODEL, MOMENTUM = "model/", "optimizer/momentum/"  # what names in a state begin with


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

    scores: Array
    gradients: dict[str, Array]


class Trainer(ABC):
    """One rank's network and optimizer in one framework.

    Every method but `state` and `fingerprint` is called by all ranks in the same order.

    Args:
        spec: The network, the same on every rank.
        recipe: Optimizer settings, the same on every rank; the learning rate comes with each step.
        comm: The ranks that train together.
        seed: Seed of the weights, the same on every rank.
        dtype: "float32" or "float64".
        sync_bn: Normalise over the global batch instead of over each rank's part of it.
        zero_residual: See `initial_weights`.
    """

    def __init__(
        self,
        spec: ResNetSpec,
        recipe: Recipe,
        comm: Communicator,
        *,
        seed: int,
        dtype: str = "float32",
        sync_bn: bool = True,
        zero_residual: bool = False,
    ) -> None:
        self._spec, self._recipe, self._comm = spec, recipe, comm
        self._sync_bn = sync_bn and comm.size > 1
        self._separate = not sync_bn and comm.size > 1  # ranks gather running statistics of their own
        self._build(initial_weights(spec, seed, dtype=dtype, zero_residual=zero_residual), dtype, seed)

    @staticmethod
    @abstractmethod
    def set_threads(count: int) -> None:
        """Let the framework compute with `count` threads; to be called before it computes anything."""

    @abstractmethod
    def _build(self, weights: dict[str, Array], dtype: str, seed: int) -> None:
        """Make the network with these weights, and the optimizer; `seed` is for whatever else is random."""

    @abstractmethod
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

    @abstractmethod
    def evaluate(self, batch: Batch) -> Sums:
        """Score a batch with the running statistics; no communication, nothing is changed."""

    @abstractmethod
    def probe(self, batch: Batch) -> Probe:
        """Forward in training mode and backward over this rank's batch, with nothing changed (running
        statistics neither). Only for trainers of a single rank."""

    def synchronise(self) -> None:
        """Make state that ranks gather separately equal on all of them (running statistics); called before
        every evaluation and checkpoint."""
        if self._separate:
            self._average_statistics()

    @abstractmethod
    def _average_statistics(self) -> None:
        """Replace running statistics by their averages over the ranks."""

    def _average(self, vectors: Sequence[Array]) -> None:
        """Replace vectors by their averages over the ranks."""
        joined = np.concatenate(vectors)
        self._comm.allreduce(
            joined, op="average", out=joined, name="running statistics", comm_dtype="float32"
        )
        ends = np.cumsum([len(vector) for vector in vectors])
        for vector, average in zip(vectors, np.split(joined, ends[:-1]), strict=True):
            vector[...] = average

    @abstractmethod
    def state(self) -> dict[str, Array]:
        """Copies of everything that a continuation needs, by name: `model/...`, `optimizer/...`,
        `rng/...`."""

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Take over what `state` returned; raises CheckpointError where it does not fit."""
        weights = {name.removeprefix(MODEL): value for name, value in state.items() if name.startswith(MODEL)}
        try:
            check_weights(self._spec, weights)
        except UsageError as error:
            raise CheckpointError(f"the checkpoint is of another network: {error}") from error
        self._load(weights, state)

    @abstractmethod
    def _load(self, weights: Mapping[str, Array], state: Mapping[str, Array]) -> None:
        """Take over weights, which fit, and from the state all else."""

    def fingerprint(self) -> str:
        """Hash of the bits of all state that has to be equal on every rank after every step."""
        left_out = self._statistics_names() if self._separate else set()
        return hash_arrays({name: value for name, value in self.state().items() if name not in left_out})

    def _statistics_names(self) -> set[str]:
        """What running statistics are called in the state."""
        return {MODEL + name for name in self._spec.state_shapes()}

    @abstractmethod
    def close(self) -> None:
        """Let go of what the trainer holds of the communicator; the last call."""


def hash_arrays(arrays: Mapping[str, Array]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of arrays, in the order of their names."""
    import hashlib

    digest = hashlib.sha256()
    for name in sorted(arrays):
        value = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {value.dtype.str} {value.shape}\n".encode())
        digest.update(value.data)
    return digest.hexdigest()
