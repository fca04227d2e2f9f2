"""Where the bridge to an MPI library is, and what it is made of."""

from __future__ import annotations

import sys
from pathlib import Path

from multiring import _core, config

__all__ = ["SOURCES", "bridge_path", "is_built"]

SOURCES = Path(_core.__file__).parent / "mpi_bridge"


def bridge_path(settings: config.Settings | None = None) -> Path:
    """Where the bridge is: MULTIRING_MPI_BRIDGE, or a file of this Python environment."""
    chosen = (settings or config.load()).mpi_bridge
    return Path(chosen) if chosen else Path(sys.prefix) / "lib" / "multiring" / "mpi_bridge.so"


def is_built(settings: config.Settings | None = None) -> bool:
    """Whether there is a bridge."""
    return bridge_path(settings).is_file()
