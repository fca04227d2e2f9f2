"""Callbacks for `fit()` of Keras 3 and of tf_keras."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

from multiring.horovod import basics
from multiring.horovod.tensorflow.functions import (
    allgather_object,
    broadcast_variables,
    optimizer_variables,
)
from multiring.horovod.tensorflow.gradients import identity_of
from multiring.horovod.tensorflow.keras.values import allreduce

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "Callback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]

Logs = dict[str, Any] | None


class Callback(keras.callbacks.Callback):
    """For Keras 3; with what tf_keras asks its own for."""

    _supports_tf_logs = False
    _chief_worker_only = None
    _keras_api_names = None

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


class BroadcastGlobalVariablesCallback(Callback):
    """Gives all ranks the model and the optimizer of one: after the first batch, which has made the
    optimizer's variables; the weights of a model that is built on all ranks before that as well."""

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None
    ) -> None:
        """Of the rank `root_rank`; `device` is ignored.

        Args:
            root_rank: Rank whose variables all ranks get.
            device: Ignored.
            local_variables: Variables that each rank keeps.
        """
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local = list(local_variables or ())

    def register_local_var(self, var: Any) -> None:
        """Leaves a variable to each rank."""
        self._local.append(var)

    def on_train_begin(self, logs: Logs = None) -> None:
        """Broadcasts the weights. With `steps_per_execution` the first batch is several, in which ranks would
        train different models, and their comparison would tell."""
        if not self.broadcast_done and all(allgather_object(bool(self.model.built))):
            self._broadcast(self.model.weights)

    def on_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Broadcasts everything after the first batch."""
        if not self.broadcast_done:
            self.broadcast_done = True
            self._broadcast([*self.model.weights, *optimizer_variables(self.model.optimizer)])

    def _broadcast(self, variables: Iterable[Any]) -> None:
        local = {identity_of(variable) for variable in self._local}
        broadcast_variables([each for each in variables if identity_of(each) not in local], self.root_rank)


class MetricAverageCallback(Callback):
    """Averages the metrics of an epoch over all ranks, in place: put it before callbacks that use them."""

    def __init__(self, device: str = "") -> None:
        """`device` is ignored."""
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Averages what is a number."""
        if logs is None:
            return
        for name, value in sorted(logs.items()):
            if np.ndim(value) == 0 and np.issubdtype(np.asarray(value).dtype, np.number):
                logs[name] = float(allreduce(np.float64(value), name=f"metric.{name}"))


class LearningRateScheduleCallback(Callback):
    """Multiplies the initial learning rate in some epochs."""

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[Any], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        """From `start_epoch` to before `end_epoch`.

        Args:
            initial_lr: What is multiplied.
            multiplier: A number, by which alone no staircase is needed, or a function of the epoch.
            start_epoch: The first epoch.
            end_epoch: The first epoch that is left alone; None: none is.
            staircase: Change it at the beginning of epochs only, or for each batch, with broken epochs.
            momentum_correction: Scale the momentum with a change of the learning rate, for one batch; only
                where the optimizer's momentum is a variable.
            steps_per_epoch: Batches of each epoch; that of `fit()` if None.

        Raises:
            ValueError: There is no initial learning rate.
        """
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.momentum_correction = staircase, momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch: int | None = None
        self.restore_momentum: Any = None
        given = multiplier
        if callable(given):
            self.multiplier: Callable[[Any], float] = given
        else:
            self.staircase = True
            self.multiplier = lambda epoch: given

    def on_train_begin(self, logs: Logs = None) -> None:
        """Finds out how many batches an epoch has."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    "Could not autodetect the number of steps per epoch. Please specify the steps_per_epoch "
                    f"parameter to the {type(self).__name__}() or upgrade to the latest version of Keras."
                )

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Remembers the epoch."""
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Sets the learning rate, if it is time."""
        epoch = self.current_epoch
        if (
            epoch is None
            or epoch < self.start_epoch
            or (self.end_epoch is not None and epoch >= self.end_epoch)
        ):
            return
        if not self.staircase:
            self._set(epoch + batch / (self.steps_per_epoch or 1))
        elif batch == 0:
            self._set(epoch)

    def on_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Takes back a change of the momentum."""
        momentum = getattr(self.model.optimizer, "momentum", None)
        if self.restore_momentum is not None and momentum is not None:
            momentum.assign(self.restore_momentum)
            self.restore_momentum = None

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Reports the learning rate."""
        if logs is not None:
            logs["lr"] = learning_rate(self.model.optimizer)

    def _set(self, epoch: Any) -> None:
        optimizer = self.model.optimizer
        old, new = learning_rate(optimizer), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        momentum = getattr(optimizer, "momentum", None)
        if self.momentum_correction and momentum is not None and hasattr(momentum, "assign") and old > 0:
            self.restore_momentum = float(np.asarray(momentum))
            momentum.assign(self.restore_momentum * new / old)


def learning_rate(optimizer: Any) -> float:
    """The learning rate of an optimizer of Keras 3 or of tf_keras."""
    value = optimizer.learning_rate
    return float(value.numpy() if hasattr(value, "numpy") else value)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Goes from the learning rate of one rank, batch by batch, to that of all ranks (Goyal et al. 2017)."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        """In the first `warmup_epochs`, from `initial_lr` / size to `initial_lr`."""

        def multiplier(epoch: Any) -> float:
            size = basics.size()
            if warmup_epochs == 0:
                return 1.0
            epoch += 1.0 / (self.steps_per_epoch or 1)  # so that the last batch has the whole of it
            return float(1.0 / size * (epoch * (size - 1) / warmup_epochs + 1))

        super().__init__(
            initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Says so when it is over."""
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0:
            rate = learning_rate(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


class BestModelCheckpoint(Callback, keras.callbacks.ModelCheckpoint):
    """Saves the model where a metric is the best so far; `filepath` may be set after it is made."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str = "best_model.keras",
    ) -> None:
        """As `keras.callbacks.ModelCheckpoint` with save_best_only."""
        if basics.is_initialized() and basics.rank() != 0:
            warnings.warn("every rank saves to its own filepath; give this callback to rank 0", stacklevel=2)
        super().__init__(filepath, monitor, verbose, save_best_only=True, mode=mode, save_freq=save_freq)
