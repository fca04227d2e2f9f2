"""Every environment variable of multiring, read and checked in this module only.

`VARIABLES` is the one table: `load` reads by it, `multiring env` prints it, and docs/launching.md repeats it.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from multiring.errors import UsageError

if TYPE_CHECKING:
    from multiring.settings import Settings

__all__ = [
    "AS_GLOO",
    "VARIABLES",
    "Setting",
    "Variable",
    "check",
    "describe",
    "load",
    "shows_full_tracebacks",
    "unknown_variables",
]

PREFIX = "MULTIRING_"
AS_GLOO = f"{PREFIX}AS_GLOO"
"""The variable by which torch.distributed's "gloo" means multiring."""


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        field: The attribute of `Settings` that it sets.
        type: What is accepted, in words.
        description: What it is for.
        parse: Turns the text into the value; raises ValueError if it is not accepted.
        set_by_launcher: True if `multiring run` sets it for each rank and a user need not.
    """

    field: str
    type: str
    description: str
    parse: Callable[[str], Any]
    set_by_launcher: bool = False

    @property
    def name(self) -> str:
        """Its name."""
        return PREFIX + self.field.upper()

    @property
    def default(self) -> str:
        """The text that stands for an absent variable; "" means there is no value."""
        try:
            from multiring.settings import Settings
        except ImportError:
            return "?"  # diagnostics do without the native library, whose defaults these are
        value = getattr(Settings(), self.field)
        if isinstance(value, bool):
            return str(int(value))
        if isinstance(value, float):
            return f"{value:g}"
        return str(value) if value else ""


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


def _heartbeat(text: str) -> float:
    value = _seconds(text)
    if not 1 <= value <= 86400:
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


def _yes_or_no(text: str) -> bool:
    return _choice("0", "1")(text) == "1"


def _secret(text: str) -> bytes:
    value = bytes.fromhex(text)
    if len(value) < 16:
        raise ValueError(text)
    return value


def _line(text: str) -> str:
    if not text.isprintable():
        raise ValueError(text)
    return text


def _mode(text: str) -> str:
    _line(text)
    try:
        from multiring import _core
    except ImportError:
        return text  # diagnostics do without the native library, whose modes these are
    _core.check_mode(text)
    return text


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _store_url(text: str) -> str:
    if not text.startswith(("file:///", "tcp://")):
        raise ValueError(text)
    return text


_COUNT = "integer, at least 1"
_INDEX = "integer, at least 0"

VARIABLES: tuple[Variable, ...] = (
    Variable("rank", _INDEX, "Rank of this process.", _integer(0), True),
    Variable("size", _COUNT, "Number of ranks of the job.", _integer(1), True),
    Variable("local_rank", _INDEX, "Rank among those of this host.", _integer(0), True),
    Variable("local_size", _COUNT, "Number of ranks on this host.", _integer(1), True),
    Variable("cross_rank", _INDEX, "Number of this host.", _integer(0), True),
    Variable("cross_size", _COUNT, "Number of hosts.", _integer(1), True),
    Variable(
        "store",
        "file:///directory or tcp://host:port",
        "Where the ranks of a job find each other.",
        _store_url,
        True,
    ),
    Variable(
        "secret",
        "hexadecimal digits, at least 16 bytes",
        "Keeps other processes out of the job; never printed.",
        _secret,
        True,
    ),
    Variable("job_id", "text", "Name of the job, the same on all ranks.", _line, True),
    Variable(
        "timeout",
        "seconds, more than 0",
        "Deadline of the rendezvous and of every collective that is given none of its own.",
        _positive_seconds,
    ),
    Variable(
        "log_level",
        "debug, info, warning or error",
        "Least serious message that is written to stderr.",
        _choice("debug", "info", "warning", "error"),
    ),
    Variable(
        "quiet",
        "0 or 1",
        "1: rank 0 does not say at the start what job this is, nor warn of too few cores.",
        _yes_or_no,
    ),
    Variable(
        "traceback",
        "short or full",
        "How an error that ends a rank is shown; short: without the lines of multiring itself.",
        _choice("short", "full"),
    ),
    Variable(
        "spin_microseconds",
        "integer, at least 0",
        "How long a wait spins (yields, where ranks outnumber cores) before it sleeps.",
        _integer(0),
    ),
    Variable(
        "staging_bytes",
        "bytes, 4096 to 1GiB; 256KiB and 4MiB are understood",
        "Size of the segment through which each rank stages tensors that are not in symmetric buffers.",
        _bytes,
    ),
    Variable(
        "stall_warning",
        "seconds; 0: never",
        "A wait that lasts longer is reported by one rank: who is missing, and what they were last in.",
        _seconds,
    ),
    Variable(
        "heartbeat",
        "seconds, 1 to 86400",
        "How long, about, until a host that has vanished, or a network between hosts, counts as lost.",
        _heartbeat,
    ),
    Variable(
        "host",
        "text",
        "Ranks of one machine with the same value share memory; empty: those with the same network devices.",
        _line,
    ),
    Variable(
        "interfaces",
        "names or networks, with commas: eth0,10.0.0.0/8; ^docker0 leaves out",
        "Network interfaces between hosts. Empty: all that are up.",
        _names,
    ),
    Variable(
        "tcp_congestion",
        "cubic, reno, dctcp, bbr or another one of /proc/sys/net/ipv4/tcp_allowed_congestion_control",
        "Congestion control of TCP between hosts. Empty: the host's; cubic or reno where that is BBR.",
        _line,
    ),
    Variable(
        "host_links",
        "switch, ring or line",
        "Which hosts reach which: each each, or its neighbours by number, in a ring or a line "
        "(docs/clusters.md).",
        _choice("switch", "ring", "line"),
    ),
    Variable(
        "mode",
        "dimensions, such as 4x8 or 4tx8d, or rounds; on one host direct, staged or rounds",
        "How allreduces run, and across hosts are divided (docs/tuning.md). Empty: chosen by their size.",
        _mode,
    ),
    Variable(
        "tuning",
        "path of a file, or off",
        "What allreduces across hosts cost, which `multiring tune` has measured, and rules for sizes. Empty: "
        "measured at the start; off: assumed (docs/tuning.md).",
        str,
    ),
    Variable(
        "transport",
        "tcp or mpi",
        "What goes between hosts. Empty: MPI where it is built and has started the ranks, else TCP.",
        _choice("tcp", "mpi"),
    ),
    Variable(
        "mpi_bridge",
        "path of a file",
        "What `multiring build mpi` has made. Empty: lib/multiring/mpi_bridge.so of the Python environment.",
        str,
    ),
    Variable(
        "comm_dtype",
        "float32, bfloat16 or float16",
        "As what float32 crosses from host to host in allreduces that do not say (docs/tuning.md).",
        _choice("float32", "bfloat16", "float16"),
    ),
    Variable(
        "order",
        "canonical or any",
        "In which order allreduces and reduce-scatters that do not say add: any lets rings run, and gives up "
        "bits that are the same wherever ranks are (docs/tuning.md).",
        _choice("canonical", "any"),
    ),
    Variable(
        "nccl",
        "off, host, hierarchical or all",
        "Where large arrays on GPUs pass by NCCL: nowhere; among ranks of one host; besides, in allreduces "
        "of several hosts, within each; or among all ranks (docs/devices.md).",
        _choice("off", "host", "hierarchical", "all"),
    ),
    Variable(
        "peer_memory",
        "0 or 1",
        "1: large arrays on GPUs of one host stay there in most collectives (docs/devices.md); what adds, in "
        "the canonical order, needs NVRTC.",
        _yes_or_no,
    ),
    Variable(
        "check_every",
        "number of steps, 0 for never",
        "How often adapters compare parameters, hyperparameters and buffers over ranks "
        "(docs/correctness.md).",
        _integer(0),
    ),
    Variable(
        "as_gloo",
        "0 or 1",
        '1: the backend "gloo" of torch.distributed is multiring (docs/torch-distributed.md).',
        _yes_or_no,
    ),
)


def load(environ: Mapping[str, str] = os.environ) -> Settings:
    """Reads and checks every variable of `environ`; an empty value counts as absent.

    Raises:
        UsageError: A value is not accepted; names the variable, the value and what is accepted.
    """
    from multiring.settings import Settings

    return Settings(**check(environ))


def check(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """What `environ` sets, by the attributes of `Settings`; does without the native library.

    Raises:
        UsageError: As `load`.
    """
    values: dict[str, Any] = {}
    for variable in VARIABLES:
        if text := environ.get(variable.name, "").strip():
            values[variable.field] = _parse(variable, text)
    return values


def shows_full_tracebacks(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether MULTIRING_TRACEBACK asks for whole tracebacks; checks nothing, as there is an error to show."""
    return environ.get(f"{PREFIX}TRACEBACK", "").strip().lower() == "full"


def _parse(variable: Variable, text: str) -> Any:
    try:
        return variable.parse(text)
    except UsageError as error:
        raise UsageError(f"environment variable {variable.name}: {error}") from None
    except (ValueError, OverflowError):
        shown = "its value" if variable.field == "secret" else repr(text)
        raise UsageError(
            f"environment variable {variable.name}: {shown} is not accepted; accepted: {variable.type}"
        ) from None


def describe(environ: Mapping[str, str] = os.environ) -> list[Setting]:
    """Every variable with the text in force and its source; does not check values, shows no secret."""
    settings = []
    for variable in VARIABLES:
        text = environ.get(variable.name, "").strip()
        source = "environment" if text else "default"
        if text and variable.field == "secret":
            text = "(set, not shown)"
        settings.append(Setting(variable, text or variable.default, source))
    return settings


def unknown_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that look like ours and are not: maps each to the likeliest one meant, or to ""."""
    known = {variable.name: variable for variable in VARIABLES}
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in known)
    meant = [name.removeprefix(PREFIX) for name, each in known.items() if not each.set_by_launcher]

    def nearest(name: str) -> str:
        near = difflib.get_close_matches(name.removeprefix(PREFIX), meant, n=1, cutoff=0.7)
        return PREFIX + near[0] if near else ""

    return {name: nearest(name) for name in unknown}
