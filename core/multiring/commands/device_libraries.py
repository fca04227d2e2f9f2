"""The libraries for devices that can be opened here, as `multiring env` and `multiring doctor` show them."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiring import _core

__all__ = ["find", "shown"]

# They put the library into a folder of their own, which the dynamic loader does not look into.
_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")

_MISSING = ": cannot open shared object file: No such file or directory"


def find() -> dict[str, _core.DeviceLibrary]:
    """The libraries by their names. Opens them, and initialises drivers.

    Raises:
        ImportError: The native library cannot be loaded.
    """
    from multiring import _core  # what loads it may tell that it cannot be loaded

    return {library.name: library for library in _core.find_device_libraries(_sites())}


def shown(library: _core.DeviceLibrary) -> str:
    """A library in one line: version, devices and file, or why there is none."""
    if not library.path:
        return f"none: {_shortened(library.why)}"
    seen = f", {_devices(library.devices)}" if library.devices >= 0 else ""
    return f"{library.version}{seen}, {library.origin}: {library.path}"


def _shortened(why: str) -> str:
    """The reasons without the many words of the dynamic loader for files that are not there."""
    reasons = why.split("; ")
    missing = [reason.removesuffix(_MISSING) for reason in reasons if reason.endswith(_MISSING)]
    others = [reason for reason in reasons if not reason.endswith(_MISSING)]
    return "; ".join([*others, *([f"no file {', '.join(missing)}"] if missing else [])])


def _devices(count: int) -> str:
    return f"{count} device{'s' * (count != 1)}"


def _sites() -> list[str]:
    """Folders that wheels of NCCL are installed in."""
    found = []
    for name in _WHEELS:
        try:
            found.append(str(importlib.metadata.distribution(name).locate_file("")))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
