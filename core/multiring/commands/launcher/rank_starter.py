"""What a job is, and how each of its ranks starts: here, or on another host."""

from __future__ import annotations

import os
import selectors
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from multiring import machine
from multiring.commands.launcher import binding
from multiring.commands.launcher.devices import check_devices, device_environments
from multiring.commands.launcher.foreign_variables import horovod_variables, torch_variables
from multiring.commands.launcher.hosts import RankSlot
from multiring.commands.launcher.process import RankProcess
from multiring.commands.launcher.remote_ranks import SSH, RemoteHost

__all__ = [
    "EXIT_NOT_EXECUTABLE",
    "EXIT_NOT_FOUND",
    "JobOptions",
    "ProgramError",
    "RankStarter",
    "command_of",
    "defaults",
    "enter_directory",
    "may_read_stdin",
    "own_python_first",
    "passed_on",
    "placement_variables",
]

EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127

_PYTHONS = ("python", "python3")
# A directory of that name, such as a clone of the repository, is found as well, but has no origin.
_FINDS_MULTIRING = "import importlib.util as u; s = u.find_spec('multiring'); exit(not (s and s.origin))"
_FIND_SECONDS = 10.0


@dataclass(frozen=True)
class JobOptions:
    """What to start and how.

    Attributes:
        ranks: Number of ranks.
        program: The program and its arguments; a name that ends in ".py" is a Python script.
        module: The module to run instead of a program; `program` then holds only its arguments.
        bind: "core", "none", or None for "core" where every rank can have a processor.
        devices: The GPU that each rank of a host sees, as `device_environments` takes it; None: all see all.
        timeout: Seconds the job may take, or None.
        output_dir: Where to write each rank's output as well, or None.
        tag_output: Whether lines begin with their rank; None means where there are several.
        environment: Variables to set for the ranks.
        rank_slots: Where each rank runs; None: all on this host.
        ssh: The command that runs a command on another host, with its options.
        python: The Python on other hosts; empty: at the place of this one.
        address: Where ranks on other hosts reach this one; empty: found out.
        descriptors: Open files that ranks on this host inherit.
        caller: Descriptor of a connection to the process that wants the job; None: there is none.
    """

    ranks: int
    program: Sequence[str]
    module: str | None = None
    bind: str | None = None
    devices: str | None = None
    timeout: float | None = None
    output_dir: Path | None = None
    tag_output: bool | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    rank_slots: Sequence[RankSlot] | None = None
    ssh: Sequence[str] = ()
    python: str = ""
    address: str = ""
    descriptors: Sequence[int] = ()
    caller: int | None = None

    def slot(self, rank: int) -> RankSlot:
        """Where a rank runs."""
        return RankSlot("", rank, self.ranks, 0, 1) if self.rank_slots is None else self.rank_slots[rank]

    @property
    def remote_hosts(self) -> list[str]:
        """The other hosts."""
        return list(dict.fromkeys(slot.host for slot in self.rank_slots or () if slot.host))


class ProgramError(Exception):
    """The program cannot be started; `code` is the exit code that a shell gives in this case."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


# Without these a rank's output comes late and a crash in native code leaves no trace.
DEFAULTS = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
# TensorFlow writes the same information on all ranks when it starts: only rank 0 shows it.
_OTHER_RANKS = {"TF_CPP_MIN_LOG_LEVEL": "1"}


class RankStarter:
    """Starts ranks.

    Args:
        options: The job.
        environ: The environment of ranks on this host.

    Attributes:
        shared: Variables that tell the ranks where to meet.
        selector: Of the loop that the ranks are watched in; ranks on other hosts need it.
        wake: To be called when one of those has ended.
        notice: What to tell the user about the Python of the ranks; empty: nothing.

    Raises:
        UsageError: More processors, or devices, are asked for than there are.
        ProgramError: There is no such program on this host, where ranks are to run on it.
    """

    def __init__(self, options: JobOptions, environ: Mapping[str, str]) -> None:
        self.shared: dict[str, str] = {}
        self.selector: selectors.BaseSelector | None = None
        self.wake: Callable[[], None] = lambda: None
        self.notice = ""
        self._hosts: dict[str, RemoteHost] = {}
        self._options = options
        self._environ: Mapping[str, str] = environ
        # Before other hosts are connected to.
        check_devices(options.devices, max(options.slot(rank).local_size for rank in range(options.ranks)))
        here = sum(not options.slot(rank).host for rank in range(options.ranks))
        if here:
            program = options.program
            if options.module is None and not program[0].endswith(".py"):  # those are run by this Python
                program, environ, self.notice = _with_multiring(program, environ)
                self._environ = environ
            self._command = command_of(program, options.module, environ)
            self._shares = binding.shares(machine.allowed_cpus(), here, options.bind)
            self._threads = binding.thread_environment(machine.core_allowance(), here, environ)
            self._devices = device_environments(options.devices, here, environ)

    def __call__(self, rank: int, piped: bool) -> RankProcess:
        """The started rank.

        Raises:
            OSError: It cannot be started.
        """
        slot = self._options.slot(rank)
        ranks = self._options.ranks
        variables = {
            **self.shared,
            **torch_variables(rank, ranks, slot),
            **placement_variables(rank, ranks, slot),
        }
        if slot.host:
            if slot.host not in self._hosts:
                self._hosts[slot.host] = self._connect(slot.host)
            return self._hosts[slot.host].ranks[rank]
        devices = self._devices[slot.local_rank]
        environ = {**defaults(rank), **self._environ, **self._threads, **devices, **variables}
        return RankProcess(
            rank,
            self._command,
            {**environ, **horovod_variables(environ)},
            cpus=None if self._shares is None else self._shares[slot.local_rank],
            stdin=rank == 0 and may_read_stdin(),
            piped=piped,
            kept=self._options.descriptors,
        )

    def _connect(self, host: str) -> RemoteHost:
        options = self._options
        rank_slots = {rank: slot for rank, slot in enumerate(options.rank_slots or []) if slot.host == host}
        rank_variables = {
            rank: placement_variables(rank, options.ranks, slot) for rank, slot in rank_slots.items()
        }
        for variables in rank_variables.values():
            variables |= horovod_variables({**options.environment, **variables}, host)
        for rank, slot in rank_slots.items():
            rank_variables[rank] |= torch_variables(rank, options.ranks, slot)
        assert self.selector is not None
        return RemoteHost(
            ssh=options.ssh or shlex.split(SSH),
            host=host,
            python=options.python,
            order={
                "program": list(options.program),
                "module": options.module,
                "bind": options.bind,
                "devices": options.devices,
                "environ": {**DEFAULTS, **passed_on(self._environ), **options.environment, **self.shared},
            },
            rank_variables=rank_variables,
            selector=self.selector,
            wake=self.wake,
        )


def defaults(rank: int) -> dict[str, str]:
    """Variables that a rank gets unless the user has set them."""
    return DEFAULTS if rank == 0 else {**DEFAULTS, **_OTHER_RANKS}


def enter_directory(directory: str) -> None:
    """Works from now on in the directory where the job was started, as its ranks do.

    Raises:
        ProgramError: It is not on this host.
    """
    try:
        os.chdir(directory)
    except OSError as error:
        raise ProgramError(
            f"there is no directory {directory}, where the job was started: {error.strerror}",
            EXIT_NOT_EXECUTABLE,
        ) from error


def command_of(program: Sequence[str], module: str | None, environ: Mapping[str, str]) -> list[str]:
    """The program and its arguments to execute, on this host.

    Raises:
        ProgramError: There is no such program.
    """
    if module is not None:
        return [sys.executable, "-u", "-m", module, *program]
    name, *arguments = program
    script = name
    if os.path.basename(name) in _PYTHONS and arguments:
        script = arguments[0]  # or each rank's Python would say that it is not there
    if script.endswith(".py") and not Path(script).is_file():
        raise ProgramError(f"there is no script {script} in {Path.cwd()}", EXIT_NOT_FOUND)
    if script is name and name.endswith(".py"):
        return [sys.executable, "-u", name, *arguments]
    if shutil.which(name, path=environ.get("PATH")) is None:
        if Path(name).is_dir():
            raise ProgramError(f"{name} is a directory, not a program", EXIT_NOT_EXECUTABLE)
        if "/" in name and Path(name).exists():
            raise ProgramError(
                f"{name} is not executable: run `chmod +x {name}`, or name the interpreter before it",
                EXIT_NOT_EXECUTABLE,
            )
        raise ProgramError(f"there is no program {name}", EXIT_NOT_FOUND)
    return [name, *arguments]


def own_python_first(environ: Mapping[str, str]) -> str:
    """A PATH on which `python` is the one that runs this, as in an activated environment."""
    return f"{os.path.dirname(sys.executable)}:{environ.get('PATH', os.defpath)}"


def _with_multiring(
    program: Sequence[str], environ: Mapping[str, str]
) -> tuple[list[str], dict[str, str], str]:
    """Program and environment in which `python` has multiring, where its environment has not been activated.

    A `python` in PATH that has multiring stays: it may be that of another environment, chosen on purpose.

    Returns:
        The program and its arguments, the environment, and what to tell the user; empty: nothing.
    """
    name, *arguments = program
    names = (name,) if name in _PYTHONS else _PYTHONS
    found = next(filter(None, (shutil.which(python, path=environ.get("PATH")) for python in names)), None)
    if found is not None and _has_multiring(found, environ):
        return list(program), dict(environ), ""
    environ = {**environ, "PATH": own_python_first(environ)}
    if name not in _PYTHONS:
        return list(program), environ, ""
    there = f"is {found}, which has no multiring" if found else "is not in PATH"
    notice = f"{name} {there}: the ranks run {sys.executable}. Activate its environment, or name the Python"
    # By its path: beside this Python there may be none of that name.
    return [sys.executable, *arguments], environ, notice


def _has_multiring(python: str, environ: Mapping[str, str]) -> bool:
    if os.path.dirname(python) == os.path.dirname(sys.executable):
        return True
    try:
        looked = subprocess.run(
            [python, "-c", _FINDS_MULTIRING],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_FIND_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return True  # no reason to take another one
    return looked.returncode == 0


def placement_variables(rank: int, size: int, slot: RankSlot) -> dict[str, str]:
    """The variables that tell a rank its place."""
    return {
        "MULTIRING_RANK": str(rank),
        "MULTIRING_SIZE": str(size),
        "MULTIRING_LOCAL_RANK": str(slot.local_rank),
        "MULTIRING_LOCAL_SIZE": str(slot.local_size),
        "MULTIRING_CROSS_RANK": str(slot.cross_rank),
        "MULTIRING_CROSS_SIZE": str(slot.cross_size),
    }


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """What ranks on other hosts get of the launcher's environment; the rest is that of the other host."""
    names = {"PYTHONPATH", *DEFAULTS, *binding.THREAD_VARIABLES}
    return {name: value for name, value in environ.items() if name in names or name.startswith("MULTIRING_")}


def may_read_stdin() -> bool:
    """Whether rank 0 may have our stdin: not from a terminal whose input belongs to another job."""
    if not os.isatty(0):
        return True
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
