"""An optimizer whose gradients travel while the next step computes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import chainer
from multiring.chainer.gradient_slots import GradientSlots
from multiring.chainer.optimizer import MultiNodeOptimizer
from multiring.errors import MultiringError, UsageError
from multiring.gradients.reducer import GradientReducer
from multiring.initialization import before_shutdown

__all__ = ["DoubleBufferingOptimizer"]


class DoubleBufferingOptimizer(MultiNodeOptimizer):
    """Updates with the gradients of the step before, as ChainerMN's double buffering does.

        step           1            2                          3
        gradients      sent         sent                       sent
        update with    nothing      the averages of step 1     the averages of step 2

    Two sets of buckets take turns, so a step's gradients have the whole next forward and backward pass to
    travel. When parameters are broadcast or the model changes, what is on its way is dropped. Nobody waits
    for that of the last step, but the world is not left before it has arrived: others may be sending theirs.

    Attributes:
        needs_update: Whether gradients are on their way, so that the next `update` updates.
    """

    needs_update: bool
    _other: GradientSlots | None
    _sent: GradientSlots | None  # whose gradients are on their way
    _scales: float | None  # the loss scale that they were made with

    def __init__(self, *args: Any, **options: Any) -> None:
        """See `create_multi_node_optimizer`."""
        super().__init__(*args, **options)
        _all.add(self)

    def __del__(self) -> None:
        """Let what is on its way arrive. Does not wait: this may be any thread, that of the peers' too."""
        sent = vars(self).get("_sent")
        if sent is not None:
            _parting.append(sent.reducer)

    def _step(self) -> None:
        if self._slots is None or self._other is None:
            return
        current, previous = self._slots, self._sent
        sent_with = self.actual_optimizer._loss_scale
        # Before the older gradients are shown in their place.
        current.send(in_place=False)
        if previous is not None:
            for parameter in previous.parameters:
                parameter.cleargrad()
            previous.receive()
            for parameter in previous.parameters:
                parameter._loss_scale = self._scales
        # On the connections of the buckets that are empty now: what has just been sent is not waited for.
        self._keep_equal(self._other, [True] * self.communicator.size)
        if previous is not None:
            self._update_parameters()
            previous.note_update()
        self._scales = sent_with
        self._sent, self.needs_update = current, True
        self._slots, self._other = self._other, current

    def backward(self, loss: chainer.Variable) -> None:
        """Refused, as `synchronize` is."""
        self.synchronize()

    def synchronize(self) -> None:
        """Refused: gradients are reduced one step late, and only by `update`."""
        raise UsageError(
            f"rank {self.communicator.rank}: with double buffering gradients cannot be had before the next "
            "update; call backward() of the loss itself, and leave synchronize() out"
        )

    @contextmanager
    def join(self) -> Iterator[None]:
        """Refused: ranks that have left would owe an answer to gradients that are still on their way."""
        raise UsageError(
            f"rank {self.communicator.rank}: join() cannot be used with double buffering; give every rank "
            "the same number of batches"
        )
        yield

    def _backward(self, loss: chainer.Variable, *, overlap: bool) -> None:
        super()._backward(loss, overlap=False)

    def _prepare(self) -> bool:
        stale = super()._prepare()
        if stale and self._sent is not None:
            self._sent.cancel()
            self._sent, self.needs_update = None, False
        return stale

    def _make_slots(self, parameters: dict[str, chainer.Parameter]) -> None:
        self._release()
        _parting[:] = [reducer for reducer in _parting if not reducer.has_arrived]
        if any(parameter.is_initialized for parameter in parameters.values()):
            self._slots, self._other = self._new_slots(parameters, 2)

    def _release(self) -> None:
        """Close all buckets; gradients that are on their way are dropped."""
        both = [vars(self).get(name) for name in ("_slots", "_other")]
        self._slots = self._other = None
        self._drop()
        self._close_all([slots for slots in both if slots is not None])

    def _drop(self) -> None:
        sent, other = (vars(self).get(name) for name in ("_sent", "_other"))
        self._sent = self._other = self._scales = None
        self.needs_update = False
        try:
            if sent is not None:
                sent.cancel()
        finally:
            if other is not None:
                other.close()


_log = logging.getLogger("multiring")

# Others are at most a step behind. A program that is told to end may not wait for longer.
_LAST_STEP_SECONDS = 10.0

_all: WeakSet[DoubleBufferingOptimizer] = WeakSet()
# Of optimizers that are gone: what was still on its way.
_parting: list[GradientReducer] = []


def _let_arrive() -> None:
    reducers = [optimizer._sent.reducer for optimizer in list(_all) if optimizer._sent is not None] + _parting
    _parting.clear()
    until = time.monotonic() + _LAST_STEP_SECONDS
    for reducer in reducers:
        try:
            reducer.await_sent(max(0.0, until - time.monotonic()))
        except MultiringError as error:
            _log.warning(
                "gradients of the last step, which nothing is updated with, have not arrived: %s", error
            )


before_shutdown(_let_arrive)
