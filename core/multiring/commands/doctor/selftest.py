"""What each rank runs in the self-test of `multiring doctor`."""

from __future__ import annotations

import sys

import numpy as np

import multiring

_COUNT = 100_000  # more than fits a small message, less than a segment


def main() -> int:
    """Adds numbers whose sum is known; returns 1 if the sum is wrong."""
    comm = multiring.init()
    own = np.arange(_COUNT, dtype=np.float32) * (comm.rank + 1)
    wanted = np.arange(_COUNT, dtype=np.float32) * sum(range(1, comm.size + 1))
    total = comm.allreduce(own)
    multiring.shutdown()
    if not np.array_equal(total, wanted):
        print(f"rank {comm.rank}: the sum is wrong", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
