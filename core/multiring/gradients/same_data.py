"""The commonest mistake: every rank trains on the same data."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from multiring.arrays import checksum
from multiring.log import warn_program

if TYPE_CHECKING:
    from multiring.communicator import Communicator
    from multiring.work import Work

__all__ = ["SameDataCheck"]

# Ways to give each rank its share of the data, by the module that programs with this way have imported.
_SHARES = {
    "torch": "torch.utils.data.DistributedSampler(data, comm.size, comm.rank)",
    "tensorflow": "multiring.tensorflow.shard_dataset",
    "chainer": "chainermn.scatter_dataset",
}


class SameDataCheck:
    """Warns if all ranks have computed the same gradients in the second round; all others cost nothing."""

    def __init__(self, comm: Communicator | None, every: int) -> None:
        """Create.

        Args:
            comm: Ranks that train together; None: one rank.
            every: The interval of checks; 0: never look.
        """
        self._comm = comm if every else None
        self._rounds = self._digest = 0
        self._work: Work | None = None

    def begin_round(self) -> None:
        """A round begins, or begins anew."""
        self._digest, self._work = 0, None

    def add(self, gradients: Iterable[NDArray[np.uint8]]) -> None:
        """Look at gradients of this rank before they leave; zeros tell nothing."""
        if self._comm is None or self._rounds != 1:
            return
        for gradient in gradients:
            if gradient.any():
                self._digest = checksum(gradient, self._digest)

    def send(self) -> None:
        """All gradients have left. Does not wait: ranks may end several models in any order."""
        if self._comm is not None and self._rounds == 1 and self._work is None:
            own = np.array([self._digest], np.uint64)
            self._work = self._comm.allgather_async(own, name="whether ranks have data of their own")

    def end_round(self) -> None:
        """The gradients of all ranks are here."""
        self._rounds += 1
        work, self._work = self._work, None
        if work is None or self._comm is None:
            return
        everyone = work.wait()
        if self._comm.rank == 0 and self._digest and (everyone == everyone[0]).all():
            warn_program(_text(self._comm.size))


def _text(size: int) -> str:
    return (
        f"all {size} ranks had the same gradients in the second step: most likely each trains on the same "
        f"data, which is no faster than one process. Give each rank its share, as by {_ways_to_share()} "
        "(docs/correctness.md; check_every=0 turns this check off)"
    )


def _ways_to_share() -> str:
    ways = [way for framework, way in _SHARES.items() if framework in sys.modules]
    return " or ".join([*ways, "data[comm.rank::comm.size]"])
