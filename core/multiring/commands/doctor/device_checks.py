"""What `multiring doctor` looks at where there are GPUs: whether ranks can have the memory of one another's.

Run as a module it is the two processes of a trial, of which one exports memory of a device, and the other one
reads it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from multiring.commands.device_libraries import DeviceLibrary, LookError, ask
from multiring.commands.doctor.finding import Finding, Status
from multiring.commands.launcher.devices import count_nvidia
from multiring.commands.launcher.process import signal_name

__all__ = ["look", "main"]

_MAX_PAIRS = 8  # that are named
_SECONDS = 30.0  # two processes open a device each
_SHARED_MEMORY = "/dev/shm"
_GOOD_SHARED_BYTES = 1 << 30  # as NVIDIA asks for; Docker gives 64 MiB
_LEGACY_STREAM = 1
_PATTERN = b"multiring" * 7
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MODULE = "multiring.commands.doctor.device_checks"


def look(
    driver: DeviceLibrary, nccl: DeviceLibrary, environ: Mapping[str, str], root: Path = Path("/")
) -> dict[str, Finding]:
    """What holds between the devices of a driver that sees some, by name.

    Args:
        driver: CUDA's or HIP's.
        nccl: NCCL's or RCCL's, if there is one.
        environ: The environment.
        root: Where the kernel's file systems begin.
    """
    is_cuda = driver.name == "CUDA driver"
    found = {}
    if (access := _access(driver, environ, count_nvidia(root) if is_cuda else 0)) is not None:
        found["peer access"] = access
    if is_cuda:  # nothing shares memory of others
        found["device IPC"] = _sharing(driver)
    if nccl.path and driver.devices > 1:
        found["NCCL shared memory"] = _shared_memory_of_nccl(root)
    return found


def _access(driver: DeviceLibrary, environ: Mapping[str, str], on_host: int) -> Finding | None:
    """Whether each device has the memory of each other one; None: there is one alone, or nobody can tell."""
    count = driver.devices
    if count == 1 < on_host and _VISIBLE in environ:
        hidden = f"not known: {_VISIBLE}={environ[_VISIBLE]} shows one of {on_host} devices"
        return Finding(Status.OK, hidden, f"run `multiring doctor` without {_VISIBLE} to see")
    if count < 2 or driver.pairs_without_access is None:
        return None
    if not driver.pairs_without_access:
        return Finding(Status.OK, f"each of {count} devices reaches the memory of each other one")
    pairs = [f"{first} and {second}" for first, second in driver.pairs_without_access]
    more = f", and {len(pairs) - _MAX_PAIRS} pairs more" if len(pairs) > _MAX_PAIRS else ""
    without = f"none between devices {', '.join(pairs[:_MAX_PAIRS])}{more} (of {count} devices)"
    see = "`nvidia-smi topo -p2p r`" if driver.name == "CUDA driver" else "`rocm-smi --showtopoaccess`"
    fix = (
        "what ranks give one another passes through host memory there, by NCCL too: choose other devices "
        f"(multiring run --devices), or see by {see} whether a virtual machine or an IOMMU is in the way"
    )
    return Finding(Status.WARNING, without, fix)


def _sharing(driver: DeviceLibrary) -> Finding:
    """Whether a process can read what another one has on a device: by a trial."""
    apart = driver.pairs_without_access
    # As ranks do that have a device each, where these reach one another.
    reader = next(
        (each for each in range(1, driver.devices) if apart is not None and (0, each) not in apart), 0
    )
    try:
        ask([_MODULE, "export", str(reader)], "memory of a device that another process has", _SECONDS)
    except LookError as error:
        fix = "run this again when no job uses the device"
        if "cuIpc" not in str(error):
            return Finding(Status.WARNING, str(error), fix)
        fix = (
            "arrays pass through host memory, not peer memory: ranks in containers of their own need the "
            "host's namespaces (docker run --ipc=host --pid=host); WSL, virtual GPUs and instances of a GPU "
            "may have no IPC"
        )
        return Finding(Status.WARNING, str(error), fix)
    return Finding(Status.OK, f"on device {reader} a process reads what another one has on device 0")


def _shared_memory_of_nccl(root: Path) -> Finding:
    """Where NCCL has what ranks of a host share."""
    try:
        there = os.statvfs(root / _SHARED_MEMORY.lstrip("/"))
    except OSError as error:
        return Finding(Status.WARNING, f"{_SHARED_MEMORY}: {error.strerror}", "mount it: NCCL needs it")
    size = there.f_blocks * there.f_frsize
    detail = f"{_SHARED_MEMORY} has {size / 2**20:,.0f} MiB"
    if size < _GOOD_SHARED_BYTES:
        fix = "NCCL may fail with `unhandled system error`: docker run --shm-size=1g, or --ipc=host"
        return Finding(Status.WARNING, detail, fix)
    return Finding(Status.OK, detail)


def main(arguments: Sequence[str]) -> int:
    """Exports memory of device 0, and has another process read it as one that works on a device; or is that
    process. What goes wrong is the last line on stderr."""
    from multiring import _core, errors

    what, device, *handle = arguments
    try:
        if what == "import":
            address = _core.import_device_memory(bytes.fromhex(handle[0]), int(device))
            read = _core.copy_from_device(address, len(_PATTERN), int(device), _LEGACY_STREAM).tobytes()
            return _fail("another process reads something else") if read != _PATTERN else 0
        exported, address = _core.export_device_memory(0)
        _core.copy_to_device(address, memoryview(_PATTERN), 0, _LEGACY_STREAM)
    except errors.MultiringError as error:
        return _fail(str(error))
    command = [sys.executable, "-P", "-m", _MODULE, "import", device, exported.hex()]
    try:  # in less time than this process has
        code = subprocess.run(command, stdin=subprocess.DEVNULL, check=False, timeout=_SECONDS / 2).returncode
    except subprocess.TimeoutExpired:
        return _fail(f"reading it has not ended after {_SECONDS / 2:g} s")
    return _fail(f"reading it ends the process with {signal_name(-code)}") if code < 0 else code


def _fail(why: str) -> int:
    print(" ".join(why.split()), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
