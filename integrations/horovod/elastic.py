"""State that can be committed and restored, and functions that start again from it.

The number of ranks does not change: a job that has lost one ends. What is there lets scripts that are written
for `horovod.elastic` run, and start again after an error that all ranks have had.
"""

from __future__ import annotations

import copy
import functools
import queue
import re
from collections.abc import Callable
from typing import Any

from multiring import errors
from multiring.horovod import basics
from multiring.horovod.exceptions import HorovodInternalError
from multiring.horovod.objects import broadcast_object

__all__ = ["HostsUpdatedInterrupt", "ObjectState", "State", "reset", "run", "run_again", "run_fn"]

_REMOVED = 1  # of hosts, as Horovod's HostUpdateResult has it; 2: added; 3: both
_LOST = re.compile(r"\b(PeerLostError|TimeoutError)\b")
_LATER = (
    "a rank is lost, and multiring.horovod does not bring up ranks in its place yet: start the job anew from "
    "a checkpoint"
)


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts were added or removed; what was done since the last commit is kept.

    Attributes:
        skip_sync: Whether the state need not be synchronised.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts were added or removed")
        self.skip_sync = skip_sync


class State:
    """What a function run by `run` has; a base for states of a program's own."""

    def __init__(
        self,
        bcast_object: Callable[..., Any] = broadcast_object,
        get_rank: Callable[[], int] = basics.rank,
        **_: Any,
    ) -> None:
        """With the functions of a face."""
        self._bcast_object, self._rank = bcast_object, get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Functions to be called after a reset, as to scale the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called after a reset."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Hosts were added or removed at this time."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Saves the state, and asks for changes of hosts."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt on all ranks where rank 0 knows of a change. Collective."""
        latest, result = self._last_updated, 0
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            if timestamp > latest:
                latest, result = timestamp, result | change
        before, latest, result = self._bcast_object((self._last_updated, latest, result))
        self._last_updated = latest
        if latest > before:
            raise HostsUpdatedInterrupt(result == _REMOVED)

    def save(self) -> None:
        """Keeps the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to what was saved."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives all ranks the state of rank 0."""
        raise NotImplementedError

    def reset(self) -> None:
        """Called after a reset, before the callbacks."""


class ObjectState(State):
    """Attributes that can be pickled: those given by name."""

    def __init__(
        self,
        bcast_object: Callable[..., Any] = broadcast_object,
        get_rank: Callable[[], int] = basics.rank,
        **kwargs: Any,
    ) -> None:
        """Of the attributes `kwargs`."""
        super().__init__(bcast_object, get_rank)
        for name, value in kwargs.items():  # the objects themselves, which the program may go on using
            setattr(self, name, value)
        self._saved_state = copy.deepcopy(kwargs)

    def save(self) -> None:
        """Keeps the attributes in memory."""
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Goes back to what was saved."""
        self._set_attributes()

    def sync(self) -> None:
        """Gives all ranks the attributes of rank 0, which keeps its objects."""
        if self._saved_state:
            own = {name: getattr(self, name) for name in self._saved_state}
            for name, value in self._bcast_object(own).items():
                setattr(self, name, value)
            ObjectState.save(self)

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))


def run_again(
    func: Callable[..., Any], reset: Callable[[], None], failures: tuple[type[Exception], ...]
) -> Callable[..., Any]:
    """A function that calls `func(state, ...)`, and again after one of the failures, with what was committed.

    Args:
        func: What trains.
        reset: Leaves the job and joins it again.
        failures: What ranks raise where a collective fails.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            except failures as error:
                _refuse_loss(error)
                state.restore()
                skip_sync = False
            reset()
            state.on_reset()

    return wrapper


def _refuse_loss(error: BaseException) -> None:
    """Raises where ranks are lost, which no new start helps."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, errors.PeerLostError | errors.TimeoutError) or _LOST.search(str(cause)):
            raise HorovodInternalError(f"{error}. {_LATER}") from error
        cause = cause.__cause__


def reset() -> None:
    """Leaves the job, and joins it again."""
    basics.shutdown()
    basics.init()


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """`run` with a function that leaves the job and joins it again."""
    return run_again(func, reset, (HorovodInternalError,))


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Has a function start again from the last commit where a collective fails on all ranks.

    The function's first argument is a `State`, which is synchronised before each call.

    Raises:
        HorovodInternalError: A rank is lost; ranks in its place come in a later release.
    """
    return run_fn(func, reset)
