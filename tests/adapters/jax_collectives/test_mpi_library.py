"""The library that jaxlib opens in the place of an MPI."""

from __future__ import annotations

import mmap
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

from tests.support import REPOSITORY, run_multiring

NAMES = REPOSITORY / "integrations/jax_collectives/native/mpi_names.txt"


def test_every_name_that_jaxlib_looks_up_is_there() -> None:
    """A name that is missing ends the process at `import jaxlib`."""
    spec = find_spec("jaxlib")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    wanted: set[str] = set()
    for path in Path(spec.submodule_search_locations[0]).glob("*.so"):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            wanted.update(name.decode() for name in re.findall(rb"(?<=\0)MPIX?ABI_\w+(?=\0)", text))
    assert len(wanted) > 600, "jaxlib has no MPItrampoline"
    listed = set(NAMES.read_text().split())
    assert wanted <= listed, f"jaxlib looks up new names; add them to {NAMES.name}: {sorted(wanted - listed)}"


def variables() -> dict[str, str]:
    printed = run_multiring("env", "--jax")
    assert printed.returncode == 0
    return dict(line.removeprefix("export ").split("=", 1) for line in printed.stdout.splitlines())


def test_the_library_has_all_names_and_needs_libc_alone() -> None:
    library = variables()["MPITRAMPOLINE_LIB"]
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    )
    defined = {line.split()[-1] for line in symbols.stdout.splitlines()}
    assert set(NAMES.read_text().split()) <= defined
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True)
    assert set(re.findall(r"NEEDED.*\[(.+)\]", needed.stdout)) <= {"libc.so.6", "libdl.so.2", "libgcc_s.so.1"}
