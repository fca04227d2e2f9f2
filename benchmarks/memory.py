"""How much memory a process takes, its share of shared memory included."""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path
from types import TracebackType

__all__ = ["PeakMemory", "proportional_bytes", "return_freed_memory"]

ROLLUP = Path("/proc/self/smaps_rollup")


def proportional_bytes() -> int:
    """The kernel's "proportional set size" of this process in bytes: private memory, and of shared memory an
    equal share for each process that has touched it. Summed over ranks, it is what they take together."""
    for line in ROLLUP.read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{ROLLUP} has no Pss line")


def return_freed_memory() -> None:
    """Has the C library give back what is freed, so that what something else has used before makes no
    difference."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:  # not the GNU C library
        return


class PeakMemory:
    """Context that looks at the memory again and again; `bytes` is the most it saw."""

    def __init__(self, interval: float = 0.002) -> None:
        self.bytes = proportional_bytes()
        self._interval = interval
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self.bytes = max(self.bytes, proportional_bytes())

    def _watch(self) -> None:
        while not self._over.is_set():
            self.bytes = max(self.bytes, proportional_bytes())
            time.sleep(self._interval)
