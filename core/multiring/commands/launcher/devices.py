"""Which GPU each rank sees: `multiring run --devices`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from multiring.errors import UsageError

__all__ = ["device_environments"]

# Read by the drivers: a process sees the devices that are named, and numbers them from 0.
_VARIABLES = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "HIP_VISIBLE_DEVICES"}


def device_environments(
    devices: str | None, ranks: int, environ: Mapping[str, str], directory: Path = Path("/dev")
) -> list[dict[str, str]]:
    """The variables that show one device to each rank of this host.

    Args:
        devices: As --devices has it: devices in the order of the local ranks, divided by commas; "auto":
            those that `environ` shows, or all of this host; None: nothing is set.
        ranks: Ranks on this host.
        environ: Their environment.
        directory: Where the kernel has its devices.

    Returns:
        One dictionary for each rank of this host, empty where nothing is set.

    Raises:
        UsageError: There are fewer devices than ranks.
    """
    if devices is None:
        return [{}] * ranks
    kind = "nvidia" if _count_nvidia(directory) or not (directory / "kfd").exists() else "amd"
    variable = _VARIABLES[kind]
    if devices == "auto":
        found = _named(environ[variable]) if variable in environ else _on_this_host(kind, directory)
        source = variable if variable in environ else str(directory)
    else:
        found, source = _named(devices), f"--devices {devices}"
    if len(found) < ranks:
        raise UsageError(
            f"{ranks} rank{'s' * (ranks != 1)} on this host and {len(found)} device{'s' * (len(found) != 1)} "
            f"({source}): start fewer ranks, or let some share one, as in --devices "
            f"{','.join(str(rank // 2) for rank in range(ranks))}"
        )
    return [{variable: device} for device in found[:ranks]]


def _named(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _on_this_host(kind: str, directory: Path) -> list[str]:
    """Numbers of the devices; a container has files of those that it may use."""
    count = _count_nvidia(directory)
    if kind == "amd":
        count = len(list(directory.glob("dri/renderD*")))
    return [str(number) for number in range(count)]


def _count_nvidia(directory: Path) -> int:
    return sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in directory.glob("nvidia*"))
