"""Finds this process's place in its job from what a launcher has put into the environment.

Recognised, the first that fits: `multiring run`, and those of `foreign.FOREIGN`. Foreign launchers bring no
store of ours, so their ranks meet in a directory whose name every rank of the job derives alike and that no
other job, nor another run of the same job, derives. On several hosts that is a port of the first one where
the launcher names the hosts (srun, TF_CONFIG, SageMaker), and torchrun's own store under torchrun
(integrations/torchrun); others have to be told.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from multiring import config
from multiring.errors import UsageError
from multiring.rendezvous.foreign import FOREIGN, TORCHRUN_SCHEME
from multiring.rendezvous.mpi.bridge import carries
from multiring.rendezvous.placement import Job, Placement, launcher_process

if TYPE_CHECKING:
    from multiring.settings import Settings

__all__ = ["TORCHRUN_SCHEME", "Placement", "detect"]


def detect(
    environ: Mapping[str, str] = os.environ,
    starter: Callable[[str], str] | None = None,
) -> Placement:
    """Returns the place that `environ` gives to this process; one rank alone where there is no launcher.

    Args:
        environ: The environment.
        starter: Names the process that started all ranks of this host, given a variable that only
            ranks have; found in /proc by default.

    Raises:
        UsageError: The variables of the launcher contradict each other or are incomplete, a variable of
            multiring has a value that is not accepted, or the job spans several hosts that have no store.
    """
    settings = config.load(environ)
    placement = _from_multiring(settings)
    for launcher, (is_recognised, read) in FOREIGN.items():
        if placement is None and is_recognised(environ):
            placement = read(Job(launcher, environ, settings, starter or launcher_process))
    if placement is not None:
        return _checked(placement, settings, environ)
    return Placement(0, 1, 0, 1, 0, 1, "none", "", None, f"none-{os.getpid()}")


def _checked(placement: Placement, settings: Settings, environ: Mapping[str, str]) -> Placement:
    pairs = (
        ("rank", placement.rank, placement.size),
        ("local rank", placement.local_rank, placement.local_size),
        ("cross rank", placement.cross_rank, placement.cross_size),
    )
    for name, index, count in pairs:
        if not 0 <= index < count:
            raise UsageError(
                f"launcher {placement.launcher}: {name} {index} of {count} cannot be: are variables left "
                "over from another job in the environment?"
            )
    # Else the ranks would look for each other in a directory of their own host.
    is_private = not settings.store and placement.store_url.startswith("file:")
    meets = not is_private or carries(settings, placement.launcher, placement.is_spread, environ)
    if placement.is_spread and placement.launcher != "multiring" and not meets:
        raise UsageError(
            f"launcher {placement.launcher}: the job has {placement.size} ranks, {placement.local_size} of "
            "them on this host, and no store where ranks of several hosts meet: start it by `multiring run "
            "-H`, or run `multiring build mpi` if MPI starts it, or set MULTIRING_STORE and "
            "MULTIRING_SECRET, both the same on all ranks (docs/clusters.md)"
        )
    return placement


def _from_multiring(settings: Settings) -> Placement | None:
    given = {
        "MULTIRING_RANK": settings.rank,
        "MULTIRING_SIZE": settings.size,
        "MULTIRING_LOCAL_RANK": settings.local_rank,
        "MULTIRING_LOCAL_SIZE": settings.local_size,
        "MULTIRING_CROSS_RANK": settings.cross_rank,
        "MULTIRING_CROSS_SIZE": settings.cross_size,
    }
    if settings.rank is None and settings.size is None:
        return None
    missing = [name for name, value in given.items() if value is None]
    if not settings.store:
        missing.append("MULTIRING_STORE")
    if missing:
        raise UsageError(
            f"MULTIRING_RANK or MULTIRING_SIZE is set but {', '.join(missing)} is not: start the program "
            "with `multiring run`, or set all of them, or none"
        )
    rank, size, local_rank, local_size, cross_rank, cross_size = (value or 0 for value in given.values())
    return Placement(
        *(rank, size, local_rank, local_size, cross_rank, cross_size),
        launcher="multiring",
        store_url=settings.store,
        secret=settings.secret,
        job_id=settings.job_id or "unnamed",
    )
