"""What signals ask of a training: the same on all ranks, after the same iteration."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from multiring.models.caffe.solver import Action

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["ACTIONS", "Requests"]

ACTIONS: tuple[Action, ...] = ("none", "snapshot", "stop")


class Requests:
    """Collects signals while it is entered. A second one that asks to stop is a KeyboardInterrupt.

    Args:
        effects: What each signal asks for.
        comm: The ranks, which have to agree.
    """

    def __init__(self, effects: Mapping[signal.Signals, Action], comm: Communicator) -> None:
        self._effects, self._comm = effects, comm
        self._asked = 0
        self._stopping = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Requests:
        for number in self._effects:
            if signal.getsignal(number) != signal.SIG_IGN:  # of nohup or a background job
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self) -> Action:
        """The strongest request of any rank since the last call. Collective."""
        asked, self._asked = self._asked, 0
        if self._comm.size > 1:
            value = np.array([asked], dtype=np.int64)
            self._comm.allreduce(value, op="max", out=value, name="requests")
            asked = int(value[0])
        return ACTIONS[asked]

    def _note(self, number: int, frame: FrameType | None) -> None:
        action = self._effects[signal.Signals(number)]
        if action == "stop":
            if self._stopping:
                raise KeyboardInterrupt
            self._stopping = True
        self._asked = max(self._asked, ACTIONS.index(action))
