"""Every environment variable of multiring, read and checked in this module only.

`VARIABLES` is the one table: `load` reads by it, `multiring env` prints it, and docs/launching.md repeats it.
"""

from __future__ import annotations

import difflib
import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from multiring.errors import UsageError
from multiring.types import CommDtypeName

__all__ = ["VARIABLES", "Setting", "Settings", "Variable", "describe", "load", "unknown_variables"]

PREFIX = "MULTIRING_"


@dataclass(frozen=True)
class Settings:
    """What the environment says, checked.

    Attributes:
        rank: Rank given by `multiring run`, or None without it; with it go `size`, `local_rank`,
            `local_size`, `cross_rank` and `cross_size`, each None where its variable is absent.
        store: URL of the rendezvous store (`file:///dir` or `tcp://host:port`); empty means none was given.
        secret: Per-job secret, or None.
        job_id: Name of the job; empty means none was given.
        timeout: Deadline in seconds of a rendezvous and of each collective that sets none itself.
        log_level: "debug", "info", "warning" or "error".
        spin_microseconds: How long a wait spins before it sleeps in the kernel, in microseconds;
            None means the native core's default.
        staging_bytes: Size in bytes of each rank's staging segment.
        stall_warning: Seconds after which a wait is reported in the log; 0 means never.
        host: Name of what shares memory with this process; empty means that the kernel tells.
        interfaces: Network interfaces to use between hosts; empty means all that are up.
        mode: How allreduces across hosts are divided; empty means that their size decides.
        tuning: File that says which algorithms allreduces across hosts use; empty means that the start of the
            job measures it, "off" that nothing does.
        transport: "tcp" or "mpi", between hosts; empty means that the launcher decides.
        mpi_bridge: Path of what `multiring build mpi` has made; empty means the usual one.
        comm_dtype: As what float32 crosses from host to host in allreduces that do not say.
        check_every: Training steps between two comparisons of the training state over ranks; 0 means never.
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
    timeout: float = 300.0
    log_level: str = "warning"
    spin_microseconds: int | None = None
    staging_bytes: int = 1 << 18
    stall_warning: float = 8.0
    host: str = ""
    interfaces: list[str] = field(default_factory=list)
    mode: str = ""
    tuning: str = ""
    transport: str = ""
    mpi_bridge: str = ""
    comm_dtype: CommDtypeName = "float32"
    check_every: int = 100


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: Its name.
        field: The attribute of `Settings` that it sets.
        default: The text that stands for an absent variable; "" means there is no value.
        type: What is accepted, in words.
        description: What it is for.
        set_by_launcher: True if `multiring run` sets it for each rank and a user need not.
        parse: Turns the text into the value; raises ValueError if it is not accepted.
    """

    name: str
    field: str
    default: str
    type: str
    description: str
    set_by_launcher: bool
    parse: Callable[[str], Any]


@dataclass(frozen=True)
class Setting:
    """A variable with the text in force and where it comes from ("default" or "environment")."""

    variable: Variable
    text: str
    source: str


def _integer(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise ValueError(text)
        return value

    return parse


def _seconds(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError(text)
    return value


def _positive_seconds(text: str) -> float:
    value = _seconds(text)
    if value == 0:
        raise ValueError(text)
    return value


_BINARY_EXPONENTS = {"": 0, "k": 10, "kib": 10, "m": 20, "mib": 20, "g": 30, "gib": 30}


def _bytes(text: str) -> int:
    digits = text.rstrip("kmgibKMGIB ")
    exponent = _BINARY_EXPONENTS.get(text[len(digits) :].strip().lower())
    if exponent is None or not 4096 <= int(digits) << exponent <= 1 << 30:
        raise ValueError(text)
    return int(digits) << exponent


def _choice(*accepted: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        value = text.lower()
        if value not in accepted:
            raise ValueError(text)
        return value

    return parse


def _secret(text: str) -> bytes:
    value = bytes.fromhex(text)
    if len(value) < 16:
        raise ValueError(text)
    return value


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _store_url(text: str) -> str:
    if not text.startswith(("file:///", "tcp://")):
        raise ValueError(text)
    return text


_COUNT = "integer, at least 1"
_INDEX = "integer, at least 0"

VARIABLES: tuple[Variable, ...] = (
    Variable("MULTIRING_RANK", "rank", "", _INDEX, "Rank of this process.", True, _integer(0)),
    Variable("MULTIRING_SIZE", "size", "", _COUNT, "Number of ranks of the job.", True, _integer(1)),
    Variable(
        "MULTIRING_LOCAL_RANK", "local_rank", "", _INDEX, "Rank among those of this host.", True, _integer(0)
    ),
    Variable(
        "MULTIRING_LOCAL_SIZE", "local_size", "", _COUNT, "Number of ranks on this host.", True, _integer(1)
    ),
    Variable("MULTIRING_CROSS_RANK", "cross_rank", "", _INDEX, "Number of this host.", True, _integer(0)),
    Variable("MULTIRING_CROSS_SIZE", "cross_size", "", _COUNT, "Number of hosts.", True, _integer(1)),
    Variable(
        "MULTIRING_STORE",
        "store",
        "",
        "file:///directory or tcp://host:port",
        "Where the ranks of a job find each other.",
        True,
        _store_url,
    ),
    Variable(
        "MULTIRING_SECRET",
        "secret",
        "",
        "hexadecimal digits, at least 16 bytes",
        "Keeps other processes out of the job; never printed.",
        True,
        _secret,
    ),
    Variable("MULTIRING_JOB_ID", "job_id", "", "text", "Name of the job, the same on all ranks.", True, str),
    Variable(
        "MULTIRING_TIMEOUT",
        "timeout",
        "300",
        "seconds, more than 0",
        "Deadline of the rendezvous and of every collective that is given none of its own.",
        False,
        _positive_seconds,
    ),
    Variable(
        "MULTIRING_LOG_LEVEL",
        "log_level",
        "warning",
        "debug, info, warning or error",
        "Least serious message that is written to stderr.",
        False,
        _choice("debug", "info", "warning", "error"),
    ),
    Variable(
        "MULTIRING_SPIN_MICROSECONDS",
        "spin_microseconds",
        "",
        "integer, at least 0",
        "How long a wait spins (yields, where ranks outnumber cores) before it sleeps; empty: 40.",
        False,
        _integer(0),
    ),
    Variable(
        "MULTIRING_STAGING_BYTES",
        "staging_bytes",
        "262144",
        "bytes, 4096 to 1GiB; 256KiB and 4MiB are understood",
        "Size of the segment through which each rank stages tensors that are not in symmetric buffers.",
        False,
        _bytes,
    ),
    Variable(
        "MULTIRING_STALL_WARNING",
        "stall_warning",
        "8",
        "seconds; 0: never",
        "A wait that lasts longer is reported by one rank: who is missing, and what they were last in.",
        False,
        _seconds,
    ),
    Variable(
        "MULTIRING_HOST",
        "host",
        "",
        "text",
        "Ranks of one machine with the same value share memory; empty: those with the same network devices.",
        False,
        str,
    ),
    Variable(
        "MULTIRING_INTERFACES",
        "interfaces",
        "",
        "names or networks, with commas: eth0,10.0.0.0/8; ^docker0 leaves out",
        "Network interfaces between hosts. Empty: all that are up.",
        False,
        _names,
    ),
    Variable(
        "MULTIRING_MODE",
        "mode",
        "",
        "dimensions, such as 4x8 or 4tx8d",
        "How allreduces across hosts are divided (docs/tuning.md). Empty: chosen by their size.",
        False,
        str,
    ),
    Variable(
        "MULTIRING_TUNING",
        "tuning",
        "",
        "path of a file, or off",
        "Which algorithms allreduces across hosts use: what `multiring tune` has measured. Empty: as a short "
        "measurement at the start tells; off: as without one (docs/tuning.md).",
        False,
        str,
    ),
    Variable(
        "MULTIRING_TRANSPORT",
        "transport",
        "",
        "tcp or mpi",
        "What goes between hosts. Empty: MPI where it is built and has started the ranks, else TCP.",
        False,
        _choice("tcp", "mpi"),
    ),
    Variable(
        "MULTIRING_MPI_BRIDGE",
        "mpi_bridge",
        "",
        "path of a file",
        "What `multiring build mpi` has made. Empty: lib/multiring/mpi_bridge.so of the Python environment.",
        False,
        str,
    ),
    Variable(
        "MULTIRING_COMM_DTYPE",
        "comm_dtype",
        "float32",
        "float32, bfloat16 or float16",
        "As what float32 crosses from host to host in allreduces that do not say (docs/tuning.md).",
        False,
        _choice("float32", "bfloat16", "float16"),
    ),
    Variable(
        "MULTIRING_CHECK_EVERY",
        "check_every",
        "100",
        "number of steps, 0 for never",
        "How often adapters compare parameters, hyperparameters and buffers over ranks "
        "(docs/correctness.md).",
        False,
        _integer(0),
    ),
)

# Accepted, with a DeprecationWarning, until the first release.
_FORMER = {"MULTIRING_COMM_DTYPE": "MULTIRING_WIRE"}


def load(environ: Mapping[str, str] = os.environ) -> Settings:
    """Reads and checks every variable of `environ`; an empty value counts as absent.

    Raises:
        UsageError: A value is not accepted; names the variable, the value and what is accepted.
    """
    values: dict[str, Any] = {}
    for variable in VARIABLES:
        text = _text(variable, environ) or variable.default
        if text:
            values[variable.field] = _parse(variable, text)
    return Settings(**values)


def _text(variable: Variable, environ: Mapping[str, str]) -> str:
    text = environ.get(variable.name, "").strip()
    former = _FORMER.get(variable.name, "")
    if text or not environ.get(former, "").strip():
        return text
    warnings.warn(f"{former} is now called {variable.name}", DeprecationWarning, stacklevel=3)
    return environ[former].strip()


def _parse(variable: Variable, text: str) -> Any:
    try:
        return variable.parse(text)
    except (ValueError, OverflowError):
        shown = "its value" if variable.field == "secret" else repr(text)
        raise UsageError(
            f"environment variable {variable.name}: {shown} is not accepted; accepted: {variable.type}"
        ) from None


def describe(environ: Mapping[str, str] = os.environ) -> list[Setting]:
    """Every variable with the text in force and its source; does not check values, shows no secret."""
    settings = []
    for variable in VARIABLES:
        text = _text(variable, environ)
        source = "environment" if text else "default"
        if text and variable.field == "secret":
            text = "(set, not shown)"
        settings.append(Setting(variable, text or variable.default, source))
    return settings


def unknown_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that look like ours and are not: maps each to the likeliest one meant, or to ""."""
    known = [*(variable.name for variable in VARIABLES), *_FORMER.values()]
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in known)
    return {name: next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.8)), "") for name in unknown}
