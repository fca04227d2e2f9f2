"""Messages that wait to be received."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from multiring import _core
from multiring.work import seconds

__all__ = ["Message", "Probe"]


@dataclass(frozen=True, slots=True)
class Message:
    """What is known of a message before it is received.

    Attributes:
        source: The rank that has sent it.
        tag: Its tag.
        dtype: Name of its dtype.
        shape: Its extents.
    """

    source: int
    tag: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.count * _core.dtype_size(self.dtype)


class Probe:
    """Waits for messages, in one thread at a time; made by `Communicator.stoppable_probe`."""

    def __init__(self, core: _core.Communicator) -> None:
        self._core = _core.Probe(core)

    def wait(
        self, sources: Sequence[int] = (), needed: Sequence[int] = (), timeout: float | None = None
    ) -> Message | None:
        """Waits for a message that can be received. Each is told once, as by MPI_Mprobe: until it is
        received, its source is passed over. Of several sources, each gets its turn.

        A source that dies is an error, for the message may be its own; one that leaves is none as long as
        another can send. One that has left before this rank was connected with it cannot be told from a dead
        one, and is an error after two seconds.

        Args:
            sources: Ranks whose messages are waited for; empty: all but this one.
            needed: Those of them whose leaving is an error all the same.
            timeout: Seconds; None: the communicator's default.

        Returns:
            The message, or None after `stop`.

        Raises:
            UsageError: `needed` has a rank that is not in `sources`.
            TimeoutError: None has come, or one has that was told before; nothing is broken.
            PeerLostError: A source has died, a needed one has left, or all have.
            AbortedError: The communicator is broken or closed.
        """
        found = self._core.wait(list(sources), list(needed), seconds(timeout))
        return None if found is None else Message(found[0], found[1], found[2], tuple(found[3]))

    def stop(self) -> None:
        """Ends the wait of another thread; if there is none, the next one. Any thread."""
        self._core.stop()
