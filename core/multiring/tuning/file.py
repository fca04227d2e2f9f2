"""What `multiring tune` writes and MULTIRING_TUNING names; the native core reads it line by line
(core/collective/plan/tuning.h)."""

from __future__ import annotations

from multiring import _core as native
from multiring import units
from multiring.errors import UsageError

__all__ = ["OFF", "ROUNDS", "has_costs", "load", "only", "rule_limits"]

OFF = "off"
ROUNDS = "rounds"
_COSTS = "costs"
_MAX_CHARACTERS = 1 << 20  # of a file; a device has no end


def load(path: str) -> str:
    """Reads and checks a file; returns its lines without comments.

    Raises:
        UsageError: It cannot be read, or a line is wrong; names the file, the line and what is expected.
    """
    try:
        with open(path) as file:
            text = file.read(_MAX_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(
            f"MULTIRING_TUNING names {path}, which cannot be read: {why}; every host needs the file, or the "
            "variable has to be unset"
        ) from None
    if len(text) > _MAX_CHARACTERS:
        raise UsageError(f"{path} is longer than any tuning")
    # Ranks compare what is left. Lines keep their numbers.
    lines = "\n".join(line.partition("#")[0].strip() for line in text.splitlines()).rstrip("\n")
    try:
        native.check_tuning(lines)
    except UsageError as error:
        raise UsageError(
            f"{path}: {error}; see docs/tuning.md, or write it anew with `multiring tune`"
        ) from None
    return lines


def has_costs(text: str) -> bool:
    """Whether a tuning says what allreduces cost, so that nothing has to be measured."""
    return any(line.split()[:1] == [_COSTS] for line in text.splitlines())


def rule_limits(text: str) -> list[int]:
    """Bytes of the largest arrays that a rule of allreduces is for, or that come before one, in no order."""
    limits: list[int] = []
    for line in text.splitlines():
        interval = line.removeprefix("allreduce").split()[:1]
        if not interval or not interval[0][0].isdigit():
            continue  # of another collective, or costs
        least, _, most = interval[0].partition("-")
        limits += [units.size(least) - 1, units.size(most) if most else 0]
    return [limit for limit in limits if limit > 0]


def only(algorithm: str) -> str:
    """A tuning by which allreduces of all sizes use one algorithm: "rounds" or a mode."""
    return f"0- {algorithm}"
