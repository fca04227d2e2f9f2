"""What the ranks of an mpi4py communicator tell each other before they do anything that all have to do."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import numpy as np

from multiring.errors import TimeoutError, UsageError

__all__ = ["agree", "compare"]

# Of what a rank tells.
_BYTES = 4096
_LONGEST_PAUSE = 0.01  # seconds

# Of exchanges that were given up: MPI may still write to them.
_abandoned: list[Any] = []


def agree(comm: Any, facts: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
    """What all ranks tell, in the order of their ranks. Collective.

    Unlike mpi4py's own allgather it can be interrupted, and ends.

    Raises:
        TimeoutError: Ranks are missing after `timeout` seconds.
    """
    encoded = _encoded({**facts, "host": socket.gethostname()})
    mine = np.zeros(_BYTES, np.uint8)
    mine[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    all_of_them = np.zeros((comm.Get_size(), _BYTES), np.uint8)
    request = comm.Iallgather(mine, all_of_them)
    deadline = time.monotonic() + timeout
    pause = 0.0
    try:
        while not request.Test():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"rank {comm.Get_rank()} of {comm.Get_size()} waited {timeout:g} s in init for the other "
                    "ranks of the communicator: one has failed, or has not called init. MULTIRING_TIMEOUT "
                    "sets how long to wait."
                )
            time.sleep(pause)
            pause = min(pause + 0.0005, _LONGEST_PAUSE)
    except BaseException:
        _abandoned.append((request, mine, all_of_them))
        raise
    return [json.loads(bytes(row).rstrip(b"\0")) for row in all_of_them]


def _encoded(facts: dict[str, Any]) -> bytes:
    """The facts in no more than `_BYTES`: a long error (of a loader, say) loses its end."""
    error = facts["error"]
    while len(encoded := json.dumps(facts).encode()) > _BYTES and error:
        error = error[: -max(1, len(error) // 16)]
        facts = {**facts, "error": error + " [...]"}
    return encoded


def compare(found: list[dict[str, Any]]) -> None:
    """Raises the same on all ranks if one has failed, or not all use the same engine.

    Raises:
        UsageError: Says which ranks, on which hosts.
    """
    for rank, facts in enumerate(found):
        if facts["error"]:
            raise UsageError(f"rank {rank} on {facts['host']}: {facts['error']}")
    for rank, facts in enumerate(found):
        if facts["engine"] != found[0]["engine"]:
            raise UsageError(
                f"rank {rank} on {facts['host']} uses {facts['engine']} between hosts, rank 0 on "
                f"{found[0]['host']} {found[0]['engine']}: run `multiring build mpi` on every host, or set "
                "MULTIRING_TRANSPORT to the same on all ranks"
            )
