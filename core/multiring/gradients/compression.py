"""What gradients lose on their way over the ranks, as an option of a reduction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from multiring.errors import UsageError

__all__ = ["COMPRESSED_DTYPES", "TopK"]

COMPRESSED_DTYPES = ("float32", "float64")


@dataclass(frozen=True)
class TopK:
    """Of each bucket every rank sends only the entries of largest magnitude, and keeps the others for later.

    What a rank keeps, the *residual*, is added to its gradients of the next step (error feedback: Stich,
    Cordonnier and Jaggi, *Sparsified SGD with Memory*, 2018), so nothing is lost, only late.

    Attributes:
        ratio: Part of a bucket's entries that is sent, more than 0 and at most 1; at least one is.
    """

    ratio: float

    def __post_init__(self) -> None:
        if not 0.0 < self.ratio <= 1.0:
            raise UsageError(f"ratio is {self.ratio}; the part that is sent is more than 0 and at most 1")

    def count(self, entries: int) -> int:
        """How many of so many entries are sent."""
        return min(entries, math.ceil(self.ratio * entries))
