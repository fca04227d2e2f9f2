"""Processes that a rank has started are not ranks, though they inherit its place in the environment."""

from __future__ import annotations

import os

from multiring.errors import UsageError
from multiring.rendezvous.launch_environment import Placement

__all__ = ["check_not_taken", "forget_placement", "note_placement"]

# Without the prefix of settings; inherited by the processes that this one starts.
_VARIABLE = "_MULTIRING_PLACE"


def note_placement(placement: Placement) -> None:
    """This process is that rank from now on."""
    os.environ[_VARIABLE] = f"{os.getpid()} {_text(placement)}"


def forget_placement() -> None:
    """It is none any more."""
    os.environ.pop(_VARIABLE, None)


def check_not_taken(placement: Placement) -> None:
    """Raise UsageError if the process that has started this one, or one before it, is that rank."""
    pid, _, taken = os.environ.get(_VARIABLE, "").partition(" ")
    if taken != _text(placement) or int(pid) == os.getpid() or not os.path.exists(f"/proc/{pid}"):
        return
    raise UsageError(
        f"this process was started by process {pid}, which is rank {placement.rank} of {placement.size} of "
        "this job already: leave communication to that, or remove the launcher's variables (MULTIRING_RANK, "
        "OMPI_COMM_WORLD_RANK, RANK and so on) from the environment of what it starts"
    )


def _text(placement: Placement) -> str:
    return f"{placement.rank} {placement.size} {placement.job_id}"
