"""The gradients of a bucket that leaves: where each of them is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

from multiring import _core
from multiring.gradients.bucket_memory import BucketMemory
from multiring.gradients.bucketing import ParameterSpec
from multiring.gradients.refusals import one_array
from multiring.gradients.round import Round
from multiring.gradients.source import IN_SLOT, Gradient, GradientSource, host_gradients
from multiring.gradients.states import GradientState, GradientStates

__all__ = ["Departure"]


class Departure:
    """Asks the adapter for the gradients of a bucket when it leaves."""

    def __init__(
        self,
        rank: int,
        specs: Sequence[ParameterSpec],
        states: GradientStates,
        arrivals: _core.Arrivals,
        memory: BucketMemory,
    ) -> None:
        self._rank, self._specs = rank, specs
        self._states, self._arrivals, self._memory = states, arrivals, memory

    def fetch(self, current: Round, number: int, source: GradientSource | None) -> list[bool]:
        """Ask for the gradients of a bucket, and fill the slots of those that this rank lacks.

        Args:
            current: The round under way.
            number: Number of the bucket.
            source: The adapter; None: this rank has no data any more.

        Returns:
            Per slot, whether this rank has a new gradient.
        """
        indices = self._memory.members[number]
        plain: Iterable[Gradient | None] = repeat(None, len(indices))
        if source is not None and self._arrivals.are_ready(number):
            found = source.fetch_plain(indices)
            if found is not None:
                if self._take_plain(current, number, *found):
                    return [True] * len(indices)
                plain = host_gradients(*found)
        return [self._fetch_one(current, *one, source) for one in zip(indices, plain, strict=True)]

    def _take_plain(self, current: Round, number: int, addresses: list[int], owners: list[object]) -> bool:
        """Take a bucket of which all gradients lie in memory of their own; False: not all do."""
        known, indices = current.addresses, self._memory.members[number]
        if not (all(addresses) and known.keys().isdisjoint(addresses)) or len({*addresses}) < len(indices):
            return False
        known.update(zip(addresses, indices, strict=True))
        current.elsewhere.update(zip(indices, host_gradients(addresses, owners), strict=True))
        self._arrivals.set_sent(number)
        return True

    def _fetch_one(
        self, current: Round, index: int, plain: Gradient | None, source: GradientSource | None
    ) -> bool:
        gradient = plain
        if gradient is None or not gradient.address:
            gradient = None if source is None else source.fetch(index)
        if gradient is None:
            self._states[index] = GradientState.ABSENT
            self._memory.slot(index)[:] = 0
            current.absent.append(index)
            return False
        if gradient is not IN_SLOT:
            other = current.addresses.setdefault(gradient.address, index)
            if other != index and all(self._specs[k].nbytes > 0 for k in (other, index)):
                raise one_array(self._rank, *(self._specs[k].name for k in sorted((other, index))))
            current.elsewhere[index] = gradient
        is_new = self._states.set_sent(index)
        if not is_new:
            # A gradient of an earlier round that the program keeps. It takes part, because another rank may
            # add to it now; if none does, these bits come back untouched by averaging.
            current.kept[index] = self._memory.read(index, current.elsewhere).copy()
        return is_new
