"""Each framework's own way to train on several processes, to compare with: `make_trainer` in each module."""

from typing import Protocol

from multiring.models.data.loader import Batch

__all__ = ["PeerTrainer"]


class PeerTrainer(Protocol):
    """The same training as a `Trainer`'s, kept in step by the framework itself.

    Its batch normalisation is over each rank's part, as these ways have it by default.
    """

    def step(self, batch: Batch, lr: float) -> object:
        """Train on one global batch, of which this rank holds a part."""

    def close(self) -> None:
        """Let go of processes and connections."""
