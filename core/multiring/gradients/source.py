"""What an adapter and the gradient reducer tell each other."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["IN_SLOT", "Gradient", "GradientSource", "RoundResult", "host_gradients"]


class Gradient(NamedTuple):
    """A gradient in memory of the framework's own, which is reduced there instead of in its slot.

    Nothing else may read or write the memory until the round has ended.

    Attributes:
        address: Of the first element; the elements lie in the order of the slot, without holes.
        owner: An object that keeps the memory alive.
        device: The device that has the memory; -1: the host.
        stream: On a device, the stream whose work so far makes the gradient.
    """

    address: int
    owner: object
    device: int = -1
    stream: int = 0


def host_gradients(addresses: Iterable[int], owners: Iterable[object]) -> Iterator[Gradient]:
    """Gradients in the host's memory, without Python's part of making each."""
    return map(_MAKE, zip(addresses, owners, repeat(-1), repeat(0)))


_MAKE: Final = functools.partial(tuple.__new__, Gradient)

IN_SLOT: Final = Gradient(0, None)
"""Says that a gradient is in its slot."""


class GradientSource(Protocol):
    """What the reducer asks an adapter, which derives from this. Parameters are given by their index."""

    def fetch_plain(self, indices: list[int]) -> tuple[list[int], list[object]] | None:
        """All gradients of a bucket that leaves, if hooks have told of each.

        Returns:
            Addresses in the host's memory, and owners; 0: `fetch` is to be asked. None: for all of them.
        """
        return None

    def fetch(self, index: int) -> Gradient | None:
        """This rank's gradient, asked for once in each round, when its bucket leaves.

        Here an adapter may also copy the gradient into its slot, or call `mark_pending` for one that nothing
        has told of. What is neither ready nor pending takes part as what an earlier round has left.

        Returns:
            `IN_SLOT`, its memory where the framework has it, or None: this rank has no gradient.
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
