"""What the gradient reducer knows of the round that is under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from multiring.gradients.bucket_memory import Bytes
from multiring.gradients.source import Gradient

if TYPE_CHECKING:
    from multiring.work import Work

__all__ = ["Round"]


@dataclass
class Round:
    """State of a round; parameters are given by their index.

    Attributes:
        works: Of the buckets that have left.
        elsewhere: Gradients that are not in their slots.
        addresses: Of those elsewhere: whose it is.
        kept: Gradients of earlier rounds that take part.
        absent: Parameters without a gradient on this rank.
        order: Broadcast of the order of arrival.
    """

    works: list[Work | None] = field(default_factory=list)
    elsewhere: dict[int, Gradient] = field(default_factory=dict)
    addresses: dict[int, int] = field(default_factory=dict)
    kept: dict[int, Bytes] = field(default_factory=dict)
    absent: list[int] = field(default_factory=list)
    order: tuple[NDArray[np.int64], Work] | None = None

    @property
    def last(self) -> Work | None:
        """Of what has been sent, what ends last; None where nothing was sent."""
        if self.order is not None:
            return self.order[1]
        return self.works[-1] if self.works else None
