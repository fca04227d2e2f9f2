"""Variables for scripts that were written for other libraries.

Horovod's, for scripts that import it; those that torchrun sets, with which `torch.distributed`, Lightning and
Accelerate start; and those by which JAX, and torch.distributed as "gloo", take their collectives from here.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import random
import re
import socket
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from multiring.commands.launcher.hosts import RankSlot
from multiring.config import AS_GLOO
from multiring.errors import UsageError

__all__ = [
    "MPI_LIBRARY",
    "gloo_variables",
    "horovod_environment",
    "horovod_variables",
    "jax_variables",
    "torch_meeting",
    "torch_variables",
]

# Horovod's own variable for what brings the ranks together; by this value they know that it is us.
_CONTROLLER, _OURS = "HOROVOD_CONTROLLER", "multiring"
_HIERARCHICAL = "HOROVOD_HIERARCHICAL_ALLREDUCE"
# Rank 0 of torch.distributed serves a store at a port that is known beforehand; systems give none of these to
# programs that ask for any.
_PORTS = range(16384, 32768)
# Older ones have other names for what is needed of them.
_FIRST_JAXLIB = (0, 9)
# By this variable torch is told whether to load the backends of installed packages.
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
# Names the library that jaxlib loads as an MPI.
MPI_LIBRARY = "MPITRAMPOLINE_LIB"
_PLACES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


def horovod_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Variables for the ranks with which `import horovod` gives multiring.horovod, and multiring's own in the
    place of a variable of Horovod.

    Args:
        given: Variables that the ranks get anyway.

    Raises:
        UsageError: multiring.horovod is not installed.
    """
    # An editable installation has the parts of the package in several folders.
    found = find_spec("multiring.horovod")
    folders = (found.submodule_search_locations if found else None) or ()
    candidates = [Path(folder) / "shim" for folder in folders]
    directory = next((each for each in candidates if each.is_dir()), None)
    if directory is None:
        raise UsageError("--horovod: there is no multiring.horovod; is this multiring installed whole?")
    all_given = {**os.environ, **given}
    before = all_given.get("PYTHONPATH", "")
    path = f"{before}{os.pathsep}{directory}" if before else str(directory)
    variables = {**given, "PYTHONPATH": path, _CONTROLLER: _OURS}
    if all_given.get(_HIERARCHICAL) == "1" and "MULTIRING_NCCL" not in all_given:
        variables["MULTIRING_NCCL"] = "hierarchical"
    return variables


def horovod_variables(environ: Mapping[str, str], host: str = "") -> dict[str, str]:
    """What Horovod calls the place of a rank; nothing where its script imports no horovod, or has no
    place.

    Args:
        environ: The rank's environment, with multiring's variables for its place.
        host: The rank's host; empty: this one.
    """
    if environ.get(_CONTROLLER) != _OURS or "MULTIRING_RANK" not in environ:
        return {}
    variables = {f"HOROVOD_{name}": environ[f"MULTIRING_{name}"] for name in _PLACES}
    return {**variables, "HOROVOD_HOSTNAME": host or socket.gethostname()}


def jax_variables() -> dict[str, str]:
    """Return the variables with which JAX takes the collectives of its CPU client from multiring.

    Raises:
        UsageError: jaxlib is too old for that, or this multiring is not installed whole.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("jaxlib")
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < _FIRST_JAXLIB:
            raise UsageError(
                f"jaxlib {version} cannot take its collectives from multiring: install jax 0.9 or newer, or "
                "use multiring.jax (docs/jax.md)"
            )
    from multiring import _core

    library = Path(_core.__file__).parent / "jax_collectives" / "libmultiring_mpi.so"
    if not library.is_file():
        raise UsageError(f"{library} is missing; is this multiring installed whole?")
    return {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "mpi", MPI_LIBRARY: str(library)}


def gloo_variables(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which torch.distributed's backend "gloo" is multiring.

    Args:
        given: Variables that the ranks get anyway.

    Raises:
        UsageError: torch is told to load no backends, so it would take its own Gloo in silence.
    """
    if {**os.environ, **given}.get(_AUTOLOAD, "1") == "0":
        raise UsageError(
            f"--as-gloo: with {_AUTOLOAD}=0 torch does not load multiring: unset it, or call "
            "multiring.torch_distributed.as_gloo() in the program"
        )
    return {AS_GLOO: "1"}


def torch_variables(rank: int, size: int, slot: RankSlot) -> dict[str, str]:
    """The place of a rank as torchrun tells it, and Lightning's name for the number of the host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(slot.local_rank),
        "LOCAL_WORLD_SIZE": str(slot.local_size),
        "NODE_RANK": str(slot.cross_rank),
    }


def torch_meeting(host: str, address: str) -> dict[str, str]:
    """Where torch's rank 0 serves its store, should the script ask for `env://`, torch's default.

    Args:
        host: Rank 0's host, with or without a user; empty: this one.
        address: Where the other ranks reach this host.
    """
    port = random.choice(_PORTS) if host else _free_port()
    return {"MASTER_ADDR": host.rpartition("@")[2] or address, "MASTER_PORT": str(port)}


def _free_port() -> int:
    """A port of this host that nobody listens on now."""
    for port in random.sample(_PORTS, 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    return random.choice(_PORTS)  # torch tells that it is taken
