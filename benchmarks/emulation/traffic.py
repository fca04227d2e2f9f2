"""What leaves emulated hosts while a contender is measured, as their interfaces count it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from multiring import Communicator

__all__ = ["LOOPBACK", "Sent", "Traffic"]

LOOPBACK = "lo"
Sent = dict[str, list[float]]
"""For each interface, by its name, the bytes that have left each host by it in one iteration."""

_DEVICES = Path("/proc/self/net/dev")
_HEADER = 2  # lines
_SENT = 8  # the column of sent bytes


class Traffic:
    """Bytes that have left this rank's host in the iterations of one contender.

    Between `begin` and `end` nothing but the contender may be sending on any host: callers meet before and
    after.
    """

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()
        self._iterations = 0

    def begin(self) -> None:
        """Counts from here."""
        self._bytes.subtract(sent_bytes())

    def end(self, iterations: int) -> None:
        """Counts until here, where so many iterations have been made since `begin`."""
        self._bytes.update(sent_bytes())
        self._iterations += iterations

    def gather(self, comm: Communicator) -> Sent:
        """Of all hosts, in their order. Collective."""
        mine = {name: count / max(self._iterations, 1) for name, count in self._bytes.items()}
        everyone: list[tuple[int, int, dict[str, float]]] = comm.allgather_object(
            (comm.local_rank, comm.cross_rank, mine)
        )
        hosts = [found for local, _, found in sorted(everyone, key=lambda one: one[:2]) if local == 0]
        return {name: [host.get(name, 0.0) for host in hosts] for name in sorted(set().union(*hosts))}


def sent_bytes(text: str | None = None) -> dict[str, int]:
    """Bytes that have left the host of this process by each interface, with all headers.

    Args:
        text: What the kernel tells of the interfaces; None: asks it.
    """
    lines = (_DEVICES.read_text() if text is None else text).splitlines()[_HEADER:]
    parts = [line.partition(":") for line in lines]
    return {name.strip(): int(numbers.split()[_SENT]) for name, _, numbers in parts}
