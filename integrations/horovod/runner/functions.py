"""`run`: a function on every rank of a job, with the arguments of `horovod.run`."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import multiring
from multiring.commands.launcher.foreign_variables import horovod_environment
from multiring.commands.launcher.hosts import is_here, parse_hostfile, parse_hosts
from multiring.errors import UsageError

__all__ = ["ELASTIC", "run"]

ELASTIC = "elastic jobs, whose number of ranks changes, are not there yet"


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | os.PathLike[str] | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Calls `func(*args, **kwargs)` on every rank of a job on this host and returns what the ranks return, in
    the order of the ranks: `multiring.run` with the arguments of `horovod.run`.

    In what the ranks import, `import horovod` gives multiring.horovod. `np`, `min_np` and `max_np` are former
    names of `num_proc`, `min_num_proc` and `max_num_proc`. The last two are an error: there are no elastic
    jobs yet. What is not described has no effect; where it is given, a warning names it.

    Args:
        func: What each rank calls; it calls `hvd.init()`. A function of the main script needs cloudpickle.
        args: Arguments of `func`.
        kwargs: Arguments of `func` by name.
        num_proc: Number of ranks.
        hosts: Hosts and their slots, as "localhost:4"; others than this one are an error.
        hostfile: The same in a file.
        output_filename: Where to write each rank's output as well, as rank.K.stdout and rank.K.stderr.
        network_interface: Network interfaces between hosts, with commas.
        executable: The Python of the ranks; any other than this one is an error.

    Raises:
        UsageError: An argument is wrong, or not possible here.
        RankError: `func` raised an exception on a rank, which is the cause, or the process of a rank ended.
    """
    given = dict(locals())
    _refuse(given)
    if np is not None:
        warnings.warn("np is deprecated, use num_proc instead", DeprecationWarning, stacklevel=2)
        num_proc = np if num_proc == 1 else num_proc
    if named := [name for name in _WITHOUT_EFFECT if given[name] is not None]:
        warnings.warn(f"horovod.run: these have no effect here: {', '.join(named)}", stacklevel=2)
    _check_hosts(hosts, hostfile, num_proc)
    own = {} if network_interface is None else {"MULTIRING_INTERFACES": network_interface}
    env = horovod_environment(own)
    return multiring.run(func, args, kwargs, np=num_proc, env=env, output_dir=output_filename)


_WITHOUT_EFFECT = (
    "slots",
    "reset_limit",
    "cooldown_range",
    "start_timeout",
    "ssh_port",
    "ssh_identity_file",
    "disable_cache",
    "verbose",
    "use_gloo",
    "use_mpi",
    "mpi_args",
)


def _refuse(given: Mapping[str, Any]) -> None:
    """
    Raises:
        UsageError: Arguments contradict each other, or ask for what is not there.
    """
    for name in ("min_num_proc", "max_num_proc", "min_np", "max_np"):
        if given[name] is not None:
            raise UsageError(f"horovod.run: {name}={given[name]}: {ELASTIC}; leave it out")
    if given["hosts"] is not None and given["hostfile"] is not None:
        raise UsageError("horovod.run: give hosts or hostfile, not both")
    if given["use_gloo"] and given["use_mpi"]:
        raise UsageError("horovod.run: give use_gloo or use_mpi, not both")
    executable = given["executable"]
    if executable is not None and not _is_this_python(executable):
        raise UsageError(
            f"horovod.run: executable={executable}: ranks run {sys.executable}, as this process does"
        )


def _is_this_python(executable: str) -> bool:
    # Links are not followed: that of a virtual environment leads to a Python that has other packages.
    return os.path.abspath(executable) == os.path.abspath(sys.executable)


def _check_hosts(hosts: str | None, hostfile: str | os.PathLike[str] | None, ranks: int) -> None:
    """
    Raises:
        UsageError: The hosts cannot be understood, are others, or have too few slots.
    """
    if hosts is None and hostfile is None:
        return
    found = parse_hosts(hosts) if hosts is not None else parse_hostfile(Path(hostfile or ""))
    others = [host.name for host in found if host.name and not is_here(host.name)]
    if others:
        raise UsageError(
            f"horovod.run: {', '.join(others)}: a function runs on this host only; for other hosts write a "
            "script, and start it by `multiring run --horovod -H ...`"
        )
    if (there := sum(host.slots for host in found)) < ranks:
        raise UsageError(f"horovod.run: {ranks} ranks, and {there} slots for them")
