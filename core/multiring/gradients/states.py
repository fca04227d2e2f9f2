"""What a rank knows of each of its gradients."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

__all__ = ["GradientState", "GradientStates"]


class GradientState(IntEnum):
    """Where one of this rank's gradients is on its way.

    When a round ends, what any rank had sent is `REDUCED` on all of them. `Arrivals` of the native core knows
    the numbers of READY and SENT.
    """

    ABSENT = 0  # none that the reducer knows of
    PENDING = 1  # accumulated: a later round is to contain it
    READY = 2  # final for the round under way
    SENT = 3  # its bucket has left
    REDUCED = 4  # what an earlier round has left, and nothing was added since


_ABSENT, _PENDING, _, _SENT, _REDUCED = map(int, GradientState)  # plain numbers compare faster
_STATES = tuple(GradientState)  # by number: faster than the class


class GradientStates:
    """The states of all gradients, by index."""

    def __init__(self, count: int) -> None:
        self._all = np.zeros(count, np.uint8)
        self._one = self._all.data  # twice as fast as the array

    @property
    def all(self) -> NDArray[np.uint8]:
        """The states as numbers, which may be changed. Shape (gradients,)."""
        return self._all

    def __getitem__(self, index: int) -> GradientState:
        return _STATES[self._one[index]]

    def __setitem__(self, index: int, state: GradientState) -> None:
        self._one[index] = state

    def set_sent(self, index: int) -> bool:
        """The gradient leaves; returns False, and changes nothing, if an earlier round contains it."""
        states = self._one
        if not _ABSENT < states[index] < _REDUCED:
            return False
        states[index] = _SENT
        return True

    @property
    def has_new(self) -> bool:
        """Whether there are gradients that no finished round contains."""
        return bool(((self._all > _ABSENT) & (self._all < _REDUCED)).any())

    def is_ready(self, index: int) -> bool:
        """Whether it is ready or sent in the round under way."""
        return _PENDING < self._one[index] < _REDUCED

    def first_ready(self) -> int | None:
        """The first that is."""
        return next(filter(self.is_ready, range(len(self._all))), None)

    def forget_new(self) -> None:
        """The round under way has ended, well or not."""
        self._all[self._all != _REDUCED] = _ABSENT

    def set_reduced(self, produced: NDArray[np.bool_]) -> None:
        """A round has reduced these."""
        self._all[produced] = _REDUCED

    def clear(self) -> None:
        """There are no gradients."""
        self._all[:] = _ABSENT
