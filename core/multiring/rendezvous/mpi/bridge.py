"""Where the bridge to an MPI library is, and when jobs use it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from multiring import config
from multiring.errors import UsageError

if TYPE_CHECKING:
    from multiring.settings import Settings

__all__ = ["bridge_path", "carries", "is_built"]


def bridge_path(settings: Settings | None = None) -> Path:
    """Where the bridge is: MULTIRING_MPI_BRIDGE, or a file of this Python environment."""
    chosen = (settings or config.load()).mpi_bridge
    return Path(chosen) if chosen else Path(sys.prefix) / "lib" / "multiring" / "mpi_bridge.so"


def is_built(settings: Settings | None = None) -> bool:
    """Whether there is a bridge.

    Raises:
        UsageError: MULTIRING_MPI_BRIDGE names none.
    """
    settings = settings or config.load()
    found = bridge_path(settings).is_file()
    if settings.mpi_bridge and not found:
        raise UsageError(
            f"MULTIRING_MPI_BRIDGE names {settings.mpi_bridge}, which is no file on {socket.gethostname()}: "
            "run `multiring build mpi` there, or unset it, or set MULTIRING_TRANSPORT=tcp"
        )
    return found


def carries(
    settings: Settings, launcher: str, is_spread: bool, environ: Mapping[str, str] = os.environ
) -> bool:
    """Whether MPI carries the bytes of a job that `launcher` has started, on several hosts if `is_spread`.

    Raises:
        UsageError: MULTIRING_MPI_BRIDGE says so, but names no file.
    """
    if settings.transport:
        return settings.transport == "mpi"
    # srun brings MPI only where it was told to (--mpi).
    by_srun = launcher == "slurm" and ("PMI_RANK" in environ or "PMIX_RANK" in environ)
    by_mpi = launcher in ("openmpi", "mpich") or by_srun
    return by_mpi and is_spread and not settings.store and is_built(settings)
