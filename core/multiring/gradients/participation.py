"""Who takes part in a round, and how the ranks without data answer until no rank has any.

Buckets of the reducer carry flags behind their gradients: one for each gradient that any rank produced, and
one for each rank that has data. Reductions in a compiled function cannot use the reducer: they run where
Python does not see values, so their flags travel as an array of their own beside the buckets, with the same
layout, and averages are corrected by what the framework computes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from multiring.communicator import Communicator

__all__ = ["answer_rounds", "own_flags"]


def own_flags(produced: Sequence[bool], rank: int, size: int) -> NDArray[np.bool_]:
    """Flags of a rank that has data; one without data lowers them all. Added up, they tell who took part.

    Args:
        produced: Per parameter, whether this rank has a gradient.
        rank: This rank.
        size: Number of ranks.

    Returns:
        Shape (parameters + ranks,).
    """
    return np.concatenate([np.asarray(produced, np.bool_), np.arange(size) == rank])


def answer_rounds(comm: Communicator, answer: Callable[[], ArrayLike]) -> int:
    """Answer the rounds of the ranks that still have data until no rank has. Collective.

    Args:
        comm: Ranks that train together.
        answer: Takes part in one round without data; tells for each rank whether it has some.

    Returns:
        A rank that had data to the end: the one to copy the state from. The same on every rank.
    """
    answered = 0
    while np.any(answer()):
        answered += 1
    # A rank that had data to the end has answered no round.
    everyone = comm.allgather(np.array([answered]), name="rounds answered in join")
    return int(np.argmin(everyone))
