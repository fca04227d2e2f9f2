"""The libraries for devices that can be opened here, as `multiring env` and `multiring doctor` show them.

Run as a module it is what looks for them: drivers may end their process, or not answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from multiring.commands.launcher.process import signal_name

__all__ = ["DeviceLibrary", "LookError", "ask", "find", "main", "shown"]

# They put the library into a folder of their own, which the dynamic loader does not look into; by their CUDA.
_WHEELS = {
    "nvidia-nccl-cu13": 13,
    "nvidia-nccl-cu12": 12,
    "nvidia-cuda-nvrtc": 13,
    "nvidia-cuda-nvrtc-cu12": 12,
}

_SECONDS = 30.0  # initialising the driver of a machine with eight GPUs takes some
_END_SECONDS = 2.0
_MARK = "device libraries: "

_MISSING = ": cannot open shared object file: No such file or directory"


class LookError(Exception):
    """What looks for the libraries has not answered."""


@dataclass(frozen=True)
class DeviceLibrary:
    """One of them.

    Attributes:
        name: "CUDA driver", "NCCL", "NVRTC", "HIP" or "RCCL".
        path: Its file; empty: none can be used.
        origin: "loaded by the process", "of a wheel" or "of the system".
        version: As "13.0".
        why: Why none can be used, a reason for each place where it was looked for.
        devices: That the driver sees; negative: not asked.
        pairs_without_access: Pairs of them that cannot have each other's memory, the lower first; None: not
            asked.
        wheels: Distributions that install this file, the last one unpacked being the one that is there.
    """

    name: str
    path: str = ""
    origin: str = ""
    version: str = ""
    why: str = ""
    devices: int = -1
    pairs_without_access: tuple[tuple[int, int], ...] | None = None
    wheels: tuple[str, ...] = ()

    @property
    def cuda(self) -> int:
        """The lowest CUDA that its wheels are built for; 0: not known."""
        return min((_WHEELS[wheel] for wheel in self.wheels), default=0)


def find(seconds: float = _SECONDS) -> dict[str, DeviceLibrary]:
    """The libraries by their names, looked for by another process.

    Raises:
        LookError: It has ended otherwise, or has not ended after so many seconds.
    """
    out = ask(["multiring.commands.device_libraries"], "the libraries for devices", seconds)
    # Libraries may print as well.
    rows = json.loads(next(line for line in out.splitlines() if line.startswith(_MARK)).removeprefix(_MARK))
    for row in rows:
        row["wheels"] = tuple(row["wheels"])
        if row["pairs_without_access"] is not None:
            row["pairs_without_access"] = tuple(map(tuple, row["pairs_without_access"]))
    return {row["name"]: DeviceLibrary(**row) for row in rows}


def ask(module: Sequence[str], what: str, seconds: float) -> str:
    """What a module prints that another process runs, and whatever it starts.

    Args:
        module: Its name, and arguments.
        what: What it opens, for messages.
        seconds: How long it may take.

    Raises:
        LookError: It has ended otherwise, with the last line on stderr, or has not ended in time.
    """
    command = [sys.executable, "-P", "-m", *module]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # One that waits for a device within the kernel does not end.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_END_SECONDS)
        if isinstance(error, subprocess.TimeoutExpired):
            raise LookError(f"{what} did not answer within {seconds:g} s") from None
        raise
    if process.returncode < 0:
        raise LookError(f"opening {what} ends the process with {signal_name(-process.returncode)}")
    if process.returncode > 0:
        raise LookError((err.strip().splitlines() or ["no message"])[-1])
    return out


def main() -> int:
    """Looks for the libraries in this process, and prints them as JSON in a line of its own."""
    from multiring import _core  # what loads it may tell that it cannot be loaded

    sites = _sites()
    rows = []
    for each in _core.find_device_libraries(list(sites)):
        row = {field.name: getattr(each, field.name, ()) for field in dataclasses.fields(DeviceLibrary)}
        if each.origin == "of a wheel":
            owners = (wheels for site, wheels in sites.items() if Path(each.path).is_relative_to(site))
            own = next(owners, [])  # the file may be a link
            row["wheels"] = [wheel for wheel in own if each.name.lower() in wheel]
        rows.append(row)
    print(f"\n{_MARK}{json.dumps(rows)}", flush=True)
    return 0


def shown(library: DeviceLibrary) -> str:
    """A library in one line: version, devices and file, or why there is none."""
    if not library.path:
        return f"none: {_shortened(library.why)}"
    seen = f", {_devices(library.devices)}" if library.devices >= 0 else ""
    origin = f"of {' or '.join(library.wheels)}" if library.wheels else library.origin
    return f"{library.version}{seen}, {origin}: {library.path}"


def _shortened(why: str) -> str:
    """The reasons without the many words of the dynamic loader for files that are not there."""
    reasons = why.split("; ")
    missing = [reason.removesuffix(_MISSING) for reason in reasons if reason.endswith(_MISSING)]
    others = [reason for reason in reasons if not reason.endswith(_MISSING)]
    return "; ".join([*others, *([f"no file {', '.join(missing)}"] if missing else [])])


def _devices(count: int) -> str:
    return f"{count} device{'s' * (count != 1)}"


def _sites() -> dict[str, list[str]]:
    """Folders that wheels of NCCL and NVRTC are installed in, and which wheels are.

    None that is looked for relative to the current directory, where anyone may have put a library.
    """
    places = [place for place in sys.path if Path(place).is_absolute()]
    found: dict[str, list[str]] = {}
    for name in _WHEELS:
        for each in importlib.metadata.distributions(name=name, path=places):
            wheels = found.setdefault(str(each.locate_file("")), [])
            if name not in wheels:
                wheels.append(name)
    return found


if __name__ == "__main__":
    sys.exit(main())
