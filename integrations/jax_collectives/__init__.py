"""JAX's own collectives over multiring.

    multiring run --jax -np 4 python train.py

    import multiring.jax_collectives  # or this line, before `import jax`

Programs that JAX itself distributes (jit with shardings, shard_map, psum, multihost_utils) run unchanged:
what JAX's CPU client does by Gloo otherwise goes over multiring. jaxlib opens any library with MPI's
functions whose name stands in a variable, and this package has such a library.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from multiring.commands.launcher.foreign_variables import jax_variables
from multiring.errors import UsageError

__all__ = ["environment", "library"]


def environment() -> dict[str, str]:
    """Return the variables with which JAX takes its collectives from multiring, for processes to be started.

    Raises:
        UsageError: jaxlib is too old, or this multiring is not installed whole.
    """
    return jax_variables()


def library(name: str) -> Path:
    """Return where a native library of this package is installed."""
    return Path(environment()["MPITRAMPOLINE_LIB"]).with_name(name)


def _enable() -> None:
    """Set the variables in this process.

    Raises:
        UsageError: JAX has been imported before, without them.
    """
    wanted = environment()
    if "jaxlib" in sys.modules and any(os.environ.get(name) != text for name, text in wanted.items()):
        raise UsageError(
            "import multiring.jax_collectives comes after import jax: put it first, since JAX looks for its "
            "collectives when it is imported"
        )
    os.environ.update(wanted)


_enable()
