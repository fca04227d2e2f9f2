"""Callbacks of Keras 3 that decide by metrics decide alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from multiring.derived import resolve
from multiring.gradients.options import check_interval
from multiring.metrics import check_count
from multiring.state.check import compare_state
from multiring.tensorflow.optimizers.keras import DistributedKerasOptimizer
from multiring.tensorflow.state_broadcast import broadcast_variables
from multiring.tensorflow.variables import buffers_of, named_variables, to_numpy

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["MetricAverage", "decide_together", "distributed_optimizer"]

Logs = dict[str, Any] | None


def _numbers(logs: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in logs.items() if np.ndim(value) == 0}


def _samples(model: Any) -> float:
    """Return the number of samples that a model's metrics are of now; 0: Keras has not counted them."""
    for metric in model.metrics:
        if isinstance(metric, keras.metrics.Mean) and metric.name == "loss":
            return float(keras.ops.convert_to_numpy(metric.count))
    return 0.0


class MetricAverage(keras.callbacks.Callback):
    """Averages the metrics of an epoch over ranks, in place, so that callbacks behind it see averages.
    Collective. A metric that some ranks do not have, such as val_loss where one rank alone has validation
    data, is averaged over those that have it, and all get it.

    Put it before callbacks that decide by metrics (EarlyStopping, ReduceLROnPlateau): all ranks then decide
    alike. `BroadcastInitialState` puts one there where it is missing.
    """

    def __init__(
        self, weight: float | Callable[[], float] | None = None, comm: Communicator | None = None
    ) -> None:
        """Create.

        Args:
            weight: What this rank counts for, or a function that says so. None: the number of samples that
                its metrics are of, of the epoch or of the validation data; where a model has a train_step
                of its own, in which Keras does not count them, all ranks count alike.
            comm: Ranks that train together; the world by default.
        """
        super().__init__()
        self._weight, self._comm = weight, comm
        self._trained, self._tested = 0.0, 0.0  # samples of this epoch

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Begins to count samples."""
        self._trained = self._tested = 0.0

    def on_test_begin(self, logs: Logs = None) -> None:
        """Counts the samples of the epoch, before the validation begins to count."""
        self._trained = self._trained or _samples(self.model)

    def on_test_end(self, logs: Logs = None) -> None:
        """Counts the samples of the validation."""
        self._tested = _samples(self.model)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Averages all metrics that are numbers."""
        own_logs = {} if logs is None else logs
        given = self._weight() if callable(self._weight) else self._weight
        comm = resolve(self._comm)
        if given is None:
            weights = self._trained or _samples(self.model), self._tested
        else:
            check_count(comm, given)
            weights = given, given
        everyone = comm.allgather_object((_numbers(own_logs), weights), name="average of metrics")
        for name in sorted(set().union(*(numbers for numbers, _ in everyone))):
            is_tested = name.startswith("val_")
            found = [(numbers[name], each[is_tested]) for numbers, each in everyone if name in numbers]
            own_logs[name] = _mean(found, is_counted=given is None)


def _mean(found: list[tuple[float, float]], *, is_counted: bool) -> float:
    """Return the weighted mean of pairs of value and weight; that of the values where samples were to be
    counted and some rank has counted none."""
    if is_counted and not all(weight for _, weight in found):
        return float(np.mean([value for value, _ in found]))
    total = sum(weight for _, weight in found)
    return sum(value * weight for value, weight in found if weight) / total if total else float("nan")


class _StopTogether(keras.callbacks.Callback):
    """Stops all ranks when one stops, and compares what they have come to. The last of the callbacks."""

    def __init__(
        self,
        comm: Communicator,
        batches: bool,
        restoring: list[Any] | None,
        *,
        compares: bool,
        has_own_buffers: bool,
    ) -> None:
        """Create.

        Args:
            comm: Ranks that train together.
            batches: A callback of some rank may stop in the middle of an epoch.
            restoring: Callbacks of this rank that may restore weights when training ends; None: no rank has
                one.
            compares: The ends of epochs compare learning rate and weights.
            has_own_buffers: Moving statistics are each rank's own.
        """
        super().__init__()
        self._comm, self._batches, self._restoring = comm, batches, restoring
        self._compares, self._has_own_buffers = compares, has_own_buffers

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Where a callback may stop in the middle of an epoch."""
        if self._batches:
            self._agree()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Before `fit()` looks whether it is to go on."""
        self._agree()
        if self._compares:
            call = "the callback BroadcastInitialState"
            compare_state(self._comm, self._state(), f"the end of epoch {epoch + 1}", call=call)

    def on_train_end(self, logs: Logs = None) -> None:
        """Gives all ranks the weights that a callback of some of them has restored."""
        if self._restoring is None:
            return
        restored = any(callback.best_weights is not None for callback in self._restoring)
        everyone = self._comm.allgather_object(restored, name="restored weights")
        ranks = [rank for rank, found in enumerate(everyone) if found]
        if 0 < len(ranks) < self._comm.size:
            broadcast_variables(self.model.weights, ranks[0], self._comm)

    def _state(self) -> Iterator[tuple[str, object]]:
        """Learning rate and weights, also of frozen layers and on backends where no step compares."""
        rate = getattr(self.model.optimizer, "learning_rate", None)
        yield "learning rate", None if rate is None else float(keras.ops.convert_to_numpy(rate))
        own = {id(variable) for variable in buffers_of(self.model).values()} if self._has_own_buffers else ()
        for name, variable in named_variables(self.model.weights).items():
            if id(variable) not in own:
                yield f"variable '{name}'", to_numpy(variable)

    def _agree(self) -> None:
        stops = np.array([bool(self.model.stop_training)])
        if self._comm.allreduce(stops, op="max", name="stop training")[0]:
            self.model.stop_training = True


def decide_together(
    container: Any, model: Any, params: Any, comm: Communicator, *, has_own_buffers: bool = False
) -> None:
    """Complete the callbacks of `fit()` so that ranks take the same decisions. Collective.

    Args:
        container: Keras's list of the callbacks, where known.
        model: The model that is trained.
        params: What Keras tells callbacks.
        comm: Ranks that train together.
        has_own_buffers: Moving statistics are each rank's own.
    """
    given = list(getattr(container, "callbacks", ()))
    known = isinstance(container, keras.callbacks.CallbackList)
    first = next((k for k, callback in enumerate(given) if _decides(callback)), len(given))
    averaged = any(isinstance(callback, MetricAverage) for callback in given[:first])
    nan = any(isinstance(callback, keras.callbacks.TerminateOnNaN) for callback in given)
    if comm.size == 1:
        return
    # Some ranks may have callbacks that others have not, such as a checkpoint on rank 0.
    restoring = [callback for callback in given if getattr(callback, "restore_best_weights", False)]
    # With a plain optimizer a program may average weights itself, when it likes.
    optimizer = distributed_optimizer(model)
    every = 0 if optimizer is None else check_interval(comm.rank, optimizer.options.reduction.check_every)
    own = (known, first < len(given) and not averaged, nan, bool(restoring), every > 0)
    everyone = comm.allgather_object(own, name="callbacks of fit")
    all_known, averages, stops, restores, compares = zip(*everyone, strict=True)
    if not all(all_known):
        return
    together = _StopTogether(
        comm,
        any(stops),
        restoring if any(restores) else None,
        compares=all(compares),
        has_own_buffers=has_own_buffers,
    )
    added: list[Any] = [together]
    if any(averages):
        average = MetricAverage(comm=comm)
        given.insert(first if first < len(given) else 0, average)
        added.append(average)
    for callback in added:
        callback.set_params(params)
        callback.set_model(model)
    container.callbacks = [*given, together]


def distributed_optimizer(model: Any) -> Any:
    """What reduces gradients of a compiled model: its optimizer, or that inside of it; None: nothing does."""
    inside = [] if model.optimizer is None else [model.optimizer, *vars(model.optimizer).values()]
    return next((one for one in inside if isinstance(one, DistributedKerasOptimizer)), None)


def _decides(callback: Any) -> bool:
    """Whether it does by metrics what has to be done on all ranks alike."""
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        return bool(callback.save_best_only)
    return isinstance(callback, keras.callbacks.EarlyStopping | keras.callbacks.ReduceLROnPlateau)
