"""State of Keras that can be committed and restored, and callbacks of `fit()` that do it."""

from __future__ import annotations

from typing import Any

from multiring.horovod.elastic import HostsUpdatedInterrupt, State
from multiring.horovod.tensorflow.elastic import TensorFlowKerasState, run
from multiring.horovod.tensorflow.keras.callbacks import Callback

__all__ = [
    "CommitStateCallback",
    "HostsUpdatedInterrupt",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(TensorFlowKerasState):
    """A model of Keras, its optimizer, and objects by name."""


class CommitStateCallback(Callback):
    """Commits a state every so many batches, and at the end of each epoch."""

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        """Of this state."""
        super().__init__()
        self.state, self.batches_per_commit = state, batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to count."""
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts, and commits."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.batches_remaining = self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Commits."""
        self.state.commit()


class UpdateBatchStateCallback(Callback):
    """Keeps `state.batch`: the number of batches of this epoch that are done. Put it before a
    `CommitStateCallback`."""

    def __init__(self, state: Any) -> None:
        """Of this state."""
        super().__init__()
        self.state = state
        self._first = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Goes on counting where it was."""
        self._first = self.state.batch

    def on_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts."""
        self.state.batch = self._first + batch + 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins anew."""
        self.state.batch = self._first = 0


class UpdateEpochStateCallback(Callback):
    """Keeps `state.epoch`: the number of epochs that are done. Put it before a `CommitStateCallback`."""

    def __init__(self, state: Any) -> None:
        """Of this state."""
        super().__init__()
        self.state = state
        self._first = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Goes on counting where it was."""
        self._first = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts. `epoch` begins at 0 in each call of `fit()`."""
        self.state.epoch = self._first + epoch + 1
