"""Callbacks for `model.fit()` of Keras 3, on every backend of Keras."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from multiring.derived import resolve
from multiring.errors import UsageError
from multiring.log import warn_program
from multiring.state.broadcast import broadcast_object
from multiring.state.buffer_sync import check_mode
from multiring.tensorflow.agreement import MetricAverage, decide_together, distributed_optimizer
from multiring.tensorflow.state_broadcast import broadcast_variables, sync_buffers
from multiring.tensorflow.variables import buffers_of, named_variables, to_numpy
from multiring.types import BufferMode

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = [
    "BroadcastInitialState",
    "LearningRateSchedule",
    "LearningRateWarmup",
    "MetricAverage",
    "RankZeroCheckpoint",
    "resume",
]

Logs = dict[str, Any] | None


def _nothing() -> None:
    """What there is to synchronise outside of training."""


class BroadcastInitialState(keras.callbacks.Callback):
    """Gives all ranks the same state when training begins, and keeps it the same. Collective.

    - Weights and optimizer state are those of rank `root`.
    - After each batch (on Keras's JAX backend before an evaluation and after each epoch) all ranks take over
      the moving statistics and other variables of layers that are not trained, so that evaluation and
      checkpoints are the same everywhere. Seeds of random layers stay each rank's own.
    - Where callbacks of any rank decide by metrics (EarlyStopping, ReduceLROnPlateau, ModelCheckpoint with
      save_best_only) and no MetricAverage comes before them, one is put there, on all ranks.
    - When one rank stops at the end of an epoch, or by TerminateOnNaN, all do.
    """

    def __init__(
        self, root: int = 0, comm: Communicator | None = None, *, buffers: BufferMode = "broadcast"
    ) -> None:
        """Create.

        Args:
            root: Rank whose state everyone gets.
            comm: Ranks that train together; the world by default.
            buffers: What becomes of variables that are not trained: "broadcast" those of rank 0, "average"
                them, or leave them "local".
        """
        super().__init__()
        self._root, self._comm, self._done, self._buffers = root, comm, False, buffers
        self._sync: Callable[[], None] = _nothing
        self._traced: tuple[list[Any], Callable[[], None]] = [], _nothing  # for which objects, and what

    def on_train_begin(self, logs: Logs = None) -> None:
        """Broadcasts the variables that the model has by now."""
        comm = resolve(self._comm)
        check_mode(comm.rank, self._buffers)
        self._sync = _nothing
        own_buffers = self._buffers == "local"
        container = sys._getframe(1).f_locals.get("self")
        decide_together(container, self.model, self.params, comm, has_own_buffers=own_buffers)
        _warn_if_alone(self.model, comm)
        steps = int(getattr(self.model, "steps_per_execution", None) or 1)
        # Of models that define a train_step of their own, parts may be built and the whole not.
        built, late = bool(self.model.built), not self.model.weights and steps > 1
        epoch = (self.params or {}).get("steps")
        found = comm.allgather_object((built, late, epoch), name="begin of training")
        _warn_if_uneven(self.model, comm, [count for _, _, count in found])
        if any(late for _, late, _ in found) and comm.size > 1:
            raise UsageError(
                f"rank {comm.rank}: the model has no variables that could be broadcast before its first "
                f"batches, and with steps_per_execution={steps} ranks would train different models until "
                "then; build it before fit() on every rank (with an Input layer or model.build(shape)), or "
                "leave steps_per_execution at 1"
            )
        self._broadcast()
        self._done = all(built for built, _, _ in found)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Broadcasts after the first batch where the model was built only then; then buffers."""
        if not self._done:
            self._broadcast()
        if keras.backend.backend() != "jax":  # where variables have no values before the epoch ends
            self._sync()

    def on_test_begin(self, logs: Logs = None) -> None:
        """Keras's JAX backend has given values to the variables."""
        if keras.backend.backend() == "jax":
            self._sync()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """As in `on_test_begin`."""
        self.on_test_begin()

    def on_train_end(self, logs: Logs = None) -> None:
        """From here on, one rank may evaluate alone."""
        self._sync = _nothing

    def _broadcast(self) -> None:
        comm = resolve(self._comm)
        model = self.model
        broadcast_variables(_state_of(model), self._root, comm)
        self._done = True

        def sync() -> None:
            sync_buffers(model, self._buffers, comm)

        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            held, _ = self._traced
            holds = [model, comm, *buffers_of(model).values()]
            if len(holds) != len(held) or any(map(operator.is_not, holds, held)):
                self._traced = holds, tf.function(sync, autograph=False)
            sync = self._traced[1]
        self._sync = sync


def _warn_if_alone(model: Any, comm: Communicator) -> None:
    """Tell of an optimizer that `fit()` would step with the gradients of this rank alone.

    A loaded model has such a one. Not an error: a program may average weights by a callback of its own.
    """
    steps_itself = not type(model).train_step.__module__.startswith("keras.")  # with a tape, perhaps
    if comm.size == 1 or comm.rank > 0 or steps_itself or model.optimizer is None:
        return
    if distributed_optimizer(model) is None:
        warn_program(
            "gradients are not reduced over ranks, since the optimizer is a plain "
            f"{type(model.optimizer).__name__}, as that of a loaded model is: set model.optimizer = "
            "multiring.tensorflow.DistributedOptimizer(model.optimizer) before its first fit(), or "
            "compile() it with that"
        )


def _warn_if_uneven(model: Any, comm: Communicator, steps: list[int | None]) -> None:
    """Tell of epochs of different lengths, of which the longer ones end at the deadline.

    Not an error: a callback of the program may stop all ranks before.
    """
    known = {count: rank for rank, count in enumerate(steps) if count is not None}
    if comm.rank == 0 and len(known) > 1 and distributed_optimizer(model) is not None:
        few, many = min(known), max(known)
        warn_program(
            f"an epoch has {few} steps on rank {known[few]} and {many} on rank "
            f"{known[many]}, which waits for the others in step {few + 1}: give all ranks equally many "
            "batches (multiring.tensorflow.shard_dataset does), or pass steps_per_epoch to fit()"
        )


class LearningRateWarmup(keras.callbacks.Callback):
    """Raises the learning rate linearly, step by step, to the one for the global batch (Goyal et al. 2017).

    Steps are counted from the first epoch, also where `fit()` begins with a later one (`initial_epoch`).
    """

    def __init__(
        self, peak: float, steps: int, start: float | None = None, comm: Communicator | None = None
    ) -> None:
        """Create.

        Args:
            peak: Learning rate after the warm-up; usually that of one rank times the number of ranks.
            steps: Batches until then; with `steps_per_execution` a call has several.
            start: Learning rate before the first batch; `peak` divided by the number of ranks by default.
            comm: Ranks that train together; the world by default.
        """
        super().__init__()
        if steps < 1:
            raise UsageError(f"a warm-up of {steps} steps; at least 1 is needed")
        self._peak, self._steps, self._start, self._comm = peak, steps, start, comm
        self._epoch = self._first = 0  # number of the epoch, and of the step that its first batch is
        self._done = 0  # steps
        self._is_rising = False  # the learning rate was set last before the peak

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Remembers the epoch: `fit()` may begin with a later one (`initial_epoch`)."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Sets the learning rate until it is at its peak; afterwards it is left alone.

        With `steps_per_execution` it is set for several batches at once, as for the first of them.
        """
        steps = (self.params or {}).get("steps") or 0  # unknown: batches that this object has seen count
        before = max(self._done, self._epoch * steps + batch)
        self._first, self._done = before - batch, before + 1
        if before >= self._steps and not self._is_rising:
            return
        self._is_rising = before < self._steps
        start = self._peak / resolve(self._comm).size if self._start is None else self._start
        part = min(before + 1, self._steps) / self._steps
        _set_learning_rate(self.model, start + (self._peak - start) * part)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Counts the batches of a call. Keras counts on past the end of an epoch."""
        steps = (self.params or {}).get("steps") or batch + 1
        self._done = max(self._done, self._first + min(batch + 1, steps))


class LearningRateSchedule(keras.callbacks.Callback):
    """Multiplies a learning rate by a function of the epoch, within a range of epochs."""

    def __init__(
        self,
        base: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        """Create.

        Args:
            base: Learning rate to multiply.
            multiplier: A factor, or a function of the epoch.
            start_epoch: First epoch in which the learning rate is set.
            end_epoch: First epoch in which it is not set any more; None for never.
            steps_per_epoch: If given, the function is called for every batch, with fractions of an epoch.
        """
        super().__init__()
        self._base, self._multiplier = base, multiplier
        self._range = start_epoch, end_epoch
        self._steps, self._epoch = steps_per_epoch, 0

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Sets the learning rate of an epoch."""
        self._epoch = epoch
        self._set(float(epoch))

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Sets the learning rate of a batch where that is wanted."""
        if self._steps is not None:
            self._set(self._epoch + batch / self._steps)

    def _set(self, epoch: float) -> None:
        start, end = self._range
        if epoch < start or (end is not None and epoch >= end):
            return
        factor = self._multiplier(epoch) if callable(self._multiplier) else self._multiplier
        _set_learning_rate(self.model, self._base * factor)


class RankZeroCheckpoint(keras.callbacks.Callback):
    """Rank 0 writes weights, optimizer state and the number of finished epochs after every epoch; see
    `resume`.

    The file is replaced as a whole: a job that dies while it writes leaves the one before.
    """

    def __init__(self, path: str | os.PathLike[str], comm: Communicator | None = None) -> None:
        """Create.

        Args:
            path: File to write, NumPy's npz.
            comm: Ranks that train together; the world by default.
        """
        super().__init__()
        self._path, self._comm = Path(path), comm

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Writes the file on rank 0."""
        if resolve(self._comm).rank != 0:
            return
        arrays = {name: _portable(to_numpy(variable)) for name, variable in _numbered(self.model).items()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(self._path.name + ".new")
        with temporary.open("wb") as file:
            np.savez(file, _epochs=np.array(epoch + 1), **arrays)  # type: ignore[arg-type]
        temporary.replace(self._path)


def resume(model: Any, path: str | os.PathLike[str], comm: Communicator | None = None) -> int:
    """Give all ranks the state that `RankZeroCheckpoint` wrote. Collective; rank 0 alone reads the file.

    Args:
        model: A compiled and built model; its optimizer is built here if it is not.
        path: The file; if there is none, nothing is changed.
        comm: Ranks that train together; the world by default.

    Returns:
        Number of finished epochs: `initial_epoch` for `model.fit`; 0 if there is no file.

    Raises:
        UsageError: The file is of another model, or cannot be read. Raised on all ranks.
    """
    comm = resolve(comm)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    state = _numbered(model)
    epochs, problem = 0, ""
    if comm.rank == 0 and Path(path).exists():
        try:
            epochs = _load(state, path)
        except Exception as error:  # raised on all ranks, which would wait for this one
            problem = str(error) if isinstance(error, UsageError) else f"{path} cannot be read: {error!r}"
    epochs, problem = broadcast_object((epochs, problem), 0, comm)
    if problem:
        raise UsageError(problem)
    if epochs:
        broadcast_variables(state, 0, comm)
    return epochs


def _load(state: dict[str, Any], path: str | os.PathLike[str]) -> int:
    """Give variables the values of a checkpoint, all or none; return the number of finished epochs."""
    with np.load(path) as arrays:
        found = {name: arrays[name] for name in arrays.files}
    epochs = int(found.pop("_epochs"))
    wrong = [name for name, v in state.items() if name not in found or found[name].shape != tuple(v.shape)]
    if wrong or len(found) != len(state):
        first = wrong[0] if wrong else "the number of variables"
        raise UsageError(f"{path} is a checkpoint of another model: {first} differs")
    for name, variable in state.items():
        value = found[name]
        # Checkpoints of old have the bytes of bfloat16.
        variable.assign(value.view(to_numpy(variable).dtype) if value.dtype.kind == "V" else value)
    return epochs


def _portable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the array; where NumPy's files have no such dtype (bfloat16, 8 bits), as float32, exactly."""
    return array.astype(np.float32) if array.dtype.kind == "V" else array


def _state_of(model: Any) -> dict[str, Any]:
    """Weights and optimizer variables by unique names."""
    found = {f"model/{name}": variable for name, variable in named_variables(model.weights).items()}
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        pairs = named_variables(optimizer.variables).items()
        found |= {f"optimizer/{name}": variable for name, variable in pairs}
    return found


def _numbered(model: Any) -> dict[str, Any]:
    """The same by position: Keras numbers its layers by how many the process has made before."""
    kinds = (name.split("/")[0] for name in _state_of(model))
    return {
        f"{kind}/{k}": v for k, (kind, v) in enumerate(zip(kinds, _state_of(model).values(), strict=True))
    }


def _set_learning_rate(model: Any, value: float) -> None:
    model.optimizer.learning_rate = value
