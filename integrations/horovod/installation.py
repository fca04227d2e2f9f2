"""What makes `import horovod` give multiring.horovod in a process."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

from multiring.commands.launcher.foreign_variables import horovod_environment
from multiring.errors import UsageError
from multiring.horovod.exceptions import HorovodInternalError
from multiring.rendezvous import launch_environment

__all__ = ["install"]

_SHIM = Path(__file__).parent / "shim"


def install() -> None:
    """Has `import horovod.torch` give `multiring.horovod.torch`, and so on, in this process and in those that
    it starts: for notebooks, and for programs that no `--horovod` started. Sets HOROVOD_RANK and the like in
    the jobs of torchrun, mpirun and srun, too. Does nothing where that has been done.

    Raises:
        UsageError: Another `horovod` has been imported already.
    """
    loaded = sys.modules.get("horovod")
    if loaded is not None and getattr(loaded, "HorovodInternalError", None) is not HorovodInternalError:
        raise UsageError(
            f"horovod is imported already, from {loaded.__file__}: call multiring.horovod.install() first"
        )
    if str(_SHIM) in sys.path:
        return
    os.environ.update(horovod_environment({}))
    with suppress(UsageError):  # hvd.init() raises it
        os.environ.update(_place())
    sys.path.insert(0, str(_SHIM))


def _place() -> dict[str, str]:
    """The place of this rank in the job of a launcher, as Horovod names it."""
    place = launch_environment.detect()
    if place.launcher == "none":
        return {}
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    found = {f"HOROVOD_{name.upper()}": str(getattr(place, name)) for name in names}
    return {**found, "HOROVOD_HOSTNAME": os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()}
