"""Which GPU each rank sees: `multiring run --devices`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from multiring.errors import UsageError

__all__ = ["check_devices", "count_nvidia", "device_environments"]

# Read by the drivers: a process sees the devices that are named, and numbers them from 0. HIP heeds the first
# one where the second is not set, so that both are set where the devices may be of either maker.
_CUDA, _HIP = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
# HIP numbers anew what this one leaves.
_ROCR = "ROCR_VISIBLE_DEVICES"

_NAME = re.compile(r"\d+|(GPU|MIG)-[\w/-]+", re.ASCII)


def check_devices(devices: str | None, ranks: int) -> None:
    """Refuses what no host can give to that many ranks.

    Args:
        devices: As --devices has it, see `device_environments`.
        ranks: Ranks on a host.

    Raises:
        UsageError: A name in a list is none of a device, or there are fewer devices than ranks.
    """
    if devices is not None and devices != "auto":
        _require_enough(_listed(devices), ranks, f"--devices {devices}")


def device_environments(
    devices: str | None, ranks: int, environ: Mapping[str, str], root: Path = Path("/")
) -> list[dict[str, str]]:
    """The variables that show one device to each rank of this host.

    Args:
        devices: As --devices has it: devices in the order of the local ranks, divided by commas; "auto":
            NVIDIA's that `environ` shows, or all of this host; None: nothing is set.
        ranks: Ranks on this host.
        environ: Their environment. Only devices that it shows are given.
        root: Where the kernel's file systems begin.

    Returns:
        One dictionary for each rank of this host, empty where nothing is set.

    Raises:
        UsageError: There are fewer devices than ranks; a name is none of a device, or of one that `environ`
            hides; "auto" is given where AMD's devices are; ROCR_VISIBLE_DEVICES is set where they may be.
    """
    if devices is None:
        return [{}] * ranks
    has_amd = (root / "dev/kfd").exists()
    if devices == "auto":
        if has_amd and not _has_nvidia(root):
            raise UsageError(
                "--devices auto knows NVIDIA's GPUs only: name those of AMD, as in --devices 0,1"
            )
        found, source = _visible(environ, root)
        _require_enough(found, ranks, source)
        return [{_CUDA: device} for device in found[:ranks]]
    found = _listed(devices)
    _require_enough(found, ranks, f"--devices {devices}")
    if has_amd and _ROCR in environ:
        raise UsageError(f"--devices with {_ROCR}, by which HIP numbers devices anew: unset one of the two")
    for variable in (_CUDA, _HIP):
        shown = _shown(environ[variable]) if variable in environ else found
        if hidden := [device for device in found if device not in shown]:
            raise UsageError(f"--devices {devices}: {hidden[0]} is not in {variable}={environ[variable]}")
    return [{_CUDA: device, _HIP: device} for device in found[:ranks]]


def _listed(devices: str) -> list[str]:
    names = [name.strip() for name in devices.split(",")]
    if wrong := [name for name in names if not _NAME.fullmatch(name)]:
        raise UsageError(
            f"--devices {devices}: {wrong[0]!r} is no device; give auto, or numbers or UUIDs "
            "(GPU-..., MIG-...), divided by commas"
        )
    return names


def _shown(text: str) -> list[str]:
    """What a variable of the drivers shows: they take what comes before the first name that is none."""
    names = []
    for name in text.split(","):
        if not _NAME.fullmatch(name.strip()):
            break
        names.append(name.strip())
    return names


def _visible(environ: Mapping[str, str], root: Path) -> tuple[list[str], str]:
    """NVIDIA's devices that ranks may use, and what tells of them."""
    if _CUDA in environ:
        return _shown(environ[_CUDA]), f"{_CUDA}={environ[_CUDA]}"
    return [str(number) for number in range(count_nvidia(root))], "in /dev and /proc/driver/nvidia/gpus"


def count_nvidia(root: Path) -> int:
    """How many GPUs of NVIDIA this host has, or this container may use."""
    # A container has files of those that it may use. The driver makes them when it is first used.
    return len(_files(root)) or len(list(root.glob("proc/driver/nvidia/gpus/*")))


def _has_nvidia(root: Path) -> bool:
    return bool(_files(root)) or any(
        (root / path).exists() for path in ("dev/nvidiactl", "proc/driver/nvidia")
    )


def _files(root: Path) -> list[Path]:
    return [path for path in root.glob("dev/nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]


def _require_enough(found: Sequence[str], ranks: int, source: str) -> None:
    if len(found) >= ranks:
        return
    shared = ",".join(found[rank * len(found) // ranks] for rank in range(ranks)) if found else ""
    raise UsageError(
        f"{ranks} rank{'s' * (ranks != 1)} on a host and {len(found)} device{'s' * (len(found) != 1)} "
        f"({source}): "
        + (f"start fewer ranks, or let some share one, as in --devices {shared}" if found else "name devices")
    )
