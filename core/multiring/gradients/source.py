"""What an adapter and the gradient reducer tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["IN_SLOT", "GradientSource", "InPlace", "RoundResult"]


class InPlace(NamedTuple):
    """A gradient in memory of the framework's own, which is reduced there instead of in its slot.

    Nobody else may read or write the memory until the round has ended.

    Attributes:
        address: Of the first element; the elements lie in the order of the slot, without holes.
        owner: An object that keeps the memory alive.
    """

    address: int
    owner: object


IN_SLOT: Final = InPlace(0, None)
"""Says that a gradient is in its slot."""


class GradientSource(Protocol):
    """What the reducer asks an adapter. Parameters are given by their index."""

    def locate(self, index: int, is_ready: bool) -> InPlace | None:
        """Where this rank's gradient is, asked once in each round, when its bucket leaves.

        Here an adapter may also copy the gradient into its slot, or, for one that is not ready, call
        `mark_produced`.

        Args:
            index: Which parameter's.
            is_ready: `mark_ready` was called in this round. Otherwise the round ends: what there is counts as
                new if `mark_produced` was called for it, and else as what an earlier round has left.

        Returns:
            `IN_SLOT`, its place in memory of the framework's, or None: this rank has no gradient.
        """

    def publish(self, index: int) -> None:
        """Show the slot as the gradient: another rank had one where this rank had none."""


@dataclass(frozen=True)
class RoundResult:
    """Who took part in a round; the same on every rank.

    Attributes:
        produced: Per parameter, whether any rank had a new gradient. Shape (parameters,).
        active: Per rank, whether it had data (see `GradientReducer.join`). Shape (ranks,).
    """

    produced: NDArray[np.bool_]
    active: NDArray[np.bool_]
