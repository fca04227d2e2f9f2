"""The settings of a process: what the native core is told, and what Python reads itself."""

from __future__ import annotations

from typing import Any

from multiring import _core

__all__ = ["Settings"]


class Settings(_core.JobSettings):
    """What the environment says, checked: what the core is told, see `config.VARIABLES`, and this.

    Attributes:
        rank: Rank given by `multiring run`, or None without it; with it go `size`, `local_rank`,
            `local_size`, `cross_rank` and `cross_size`, each None where its variable is absent.
        store: URL of the rendezvous store (`file:///dir` or `tcp://host:port`); empty means none was given.
        secret: Per-job secret, or None.
        job_id: Name of the job; empty means none was given.
        quiet: Whether rank 0 says nothing at the start.
        traceback: "short": without frames of multiring; "full": as Python shows it.
        log_level: "debug", "info", "warning" or "error".
        tuning: File that says what allreduces across hosts cost, and which algorithms they use; the core is
            told what it says.
        mpi_bridge: Path of what `multiring build mpi` has made; empty means the usual one.
        check_every: Training steps between two comparisons of the training state over ranks; 0 means never.
        as_gloo: Whether torch.distributed's "gloo" means multiring.
    """

    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    cross_rank: int | None = None
    cross_size: int | None = None
    store: str = ""
    secret: bytes | None = None
    job_id: str = ""
    log_level: str = "warning"
    quiet: bool = False
    traceback: str = "short"
    mpi_bridge: str = ""
    check_every: int = 100
    as_gloo: bool = False

    def __init__(self, **values: Any) -> None:
        super().__init__()
        for field, value in values.items():
            setattr(self, field, value)

    def __setattr__(self, field: str, value: Any) -> None:
        if not hasattr(type(self), field):
            raise AttributeError(f"there is no setting {field!r}")
        super().__setattr__(field, value)
