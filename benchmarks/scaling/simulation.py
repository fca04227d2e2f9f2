"""Runs allreduces under SimGrid's SMPI (Debian: libsimgrid-dev)."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from multiring.benchmarks.scaling.machine import CONTENDERS, Machine, environment, is_ours, is_timing_only
from multiring.errors import UsageError

__all__ = ["SIZES", "build", "simulate"]

# Bytes that are simulated; what lies between is interpolated.
SIZES = (262_144, 2_097_152, 27_262_976)

_ROOT = Path(__file__).resolve().parent.parent.parent


def build() -> Path:
    """Compiles the core and the program that runs it; returns the program.

    Raises:
        UsageError: SimGrid or the sources are not there, or do not compile.
    """
    if shutil.which("smpicxx") is None:
        raise UsageError("SimGrid is not installed: run apt-get install libsimgrid-dev")
    if not (_ROOT / "CMakeLists.txt").is_file():
        raise UsageError("the simulation is built from the repository: run make scaling there")
    directory = _ROOT / "build" / "scaling"
    directory.mkdir(parents=True, exist_ok=True)
    for command in (
        ["cmake", "-S", str(_ROOT), "-B", str(directory), "-G", "Ninja", "-DMULTIRING_BUILD_SIMULATION=ON"],
        ["cmake", "--build", str(directory), "--target", "simulation"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise UsageError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return directory / "benchmarks" / "scaling" / "simulated_allreduce"


def simulate(
    program: Path,
    contender: str,
    ranks: int,
    machine: Machine,
    sizes: Sequence[int] = SIZES,
    timing_only: bool | None = None,
) -> dict[int, float]:
    """Seconds of an allreduce of each size in bytes; sums have been checked.

    What a library adds is not in it (`Machine.addition_seconds`).

    Args:
        program: What `build` returns.
        contender: A key of `CONTENDERS`.
        ranks: Number of ranks.
        machine: What is simulated.
        sizes: Bytes of the allreduces.
        timing_only: A library's messages of these sizes carry no data, only those of the check of sums do
            [where `is_timing_only` says so]. Those of multiring always do.

    Raises:
        UsageError: The simulation failed.
    """
    if timing_only is None:
        timing_only = is_timing_only(contender, ranks)
    who = "multiring" if is_ours(contender) else "mpi-timing" if timing_only else "mpi"
    hosts = ranks // machine.ranks_per_host
    with tempfile.TemporaryDirectory(prefix="multiring-scaling-") as directory:
        platform = Path(directory) / "platform.xml"
        hostfile = Path(directory) / "hosts"
        platform.write_text(machine.platform(hosts))
        hostfile.write_text("".join(f"node-{host}:{machine.ranks_per_host}\n" for host in range(hosts)))
        done = subprocess.run(
            [
                *("smpirun", "-np", str(ranks), "-platform", str(platform), "-hostfile", str(hostfile)),
                *_options(machine),
                *CONTENDERS[contender],
                *(str(program), who),
                *(str(machine.ranks_per_host), str(2.0 / machine.memory_bytes_per_second)),
                str(machine.memory_seconds_per_byte_sent(hosts) if is_ours(contender) else 0.0),
                *map(str, sizes),
            ],
            capture_output=True,
            text=True,
            cwd=directory,
            env=os.environ | environment(contender, machine, hosts),
        )
    lines = [line.split() for line in done.stdout.splitlines()]
    found = {int(line[0]): float(line[1]) for line in lines if len(line) == 2 and line[0].isdigit()}
    if done.returncode != 0 or set(found) != set(sizes):
        raise UsageError(f"{contender} on {ranks} ranks failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return found


def _options(machine: Machine) -> list[str]:
    return [
        "--log=root.thres:critical",
        "--cfg=smpi/simulate-computation:no",  # it is charged, see machine.py
        "--cfg=smpi/host-speed:1Gf",  # that of the platform's processors: a second is charged as a second
        "--cfg=smpi/cpu-threshold:0",
        "--cfg=smpi/privatization:no",  # the ranks share the memory of their host
        f"--cfg=smpi/bw-factor:0:{machine.usable}",
        "--cfg=smpi/lat-factor:0:1",
        f"--cfg=smpi/os:0:{machine.message_seconds}:0",
        f"--cfg=smpi/or:0:{machine.message_seconds}:0",
        f"--cfg=smpi/ois:0:{machine.message_seconds}:0",
        "--cfg=network/crosstraffic:no",
        "--cfg=contexts/stack-size:8192",
        # Before each allreduce that is timed, for all alike. SimGrid's own lets ranks go one after the other,
        # a microsecond apart: those who wait for the last would count that as theirs.
        "--cfg=smpi/barrier:ompi_bruck",
        # Libraries' own copies of what they add, which a thousand ranks have no room for.
        "--cfg=smpi/auto-shared-malloc-thresh:1048576",
    ]
