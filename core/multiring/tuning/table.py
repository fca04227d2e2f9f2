"""What `multiring tune` writes and MULTIRING_TUNING names: as a file, and as the native core reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from multiring import _core as native
from multiring.errors import UsageError

__all__ = ["AUTO", "OFF", "ROUNDS", "Algorithm", "SizeClass", "Tuning", "load", "ranks_of_hosts"]

FORMAT = "multiring tuning 1"
_MAX_CHARACTERS = 1 << 20  # of a file; a device has no end
OFF = "off"
ROUNDS = "rounds"
AUTO = "auto"


@dataclass(frozen=True)
class Algorithm:
    """How an allreduce crosses hosts.

    Attributes:
        mode: "rounds" (what every rank has goes to every host whole), "auto" (the automatic plan), or the
            mode of a plan, as MULTIRING_MODE has it.
        segment: Bytes of a segment of the plan; 0: chosen by the size.
    """

    mode: str
    segment: int = 0

    def __str__(self) -> str:
        return f"{self.mode}/{self.segment}" if self.segment else self.mode


@dataclass(frozen=True)
class SizeClass:
    """Allreduces of up to so many bytes, and more than the class before has, use this algorithm."""

    up_to: int
    algorithm: Algorithm


@dataclass(frozen=True)
class Tuning:
    """Algorithms by size.

    Attributes:
        ranks: Number of ranks of each host that it was measured on, and is for.
        classes: From small to large; what is larger than all goes as the last.
    """

    ranks: tuple[int, ...]
    classes: tuple[SizeClass, ...]

    @property
    def layout(self) -> str:
        """The hosts in short: "4x2" is four of two ranks each, "2+1" two that differ."""
        if len(set(self.ranks)) == 1:
            return f"{len(self.ranks)}x{self.ranks[0]}"
        return "+".join(map(str, self.ranks))

    @property
    def text(self) -> str:
        """As the native core reads it (core/collective/plan/tuning.h), in one line."""
        return f"{self.layout}:" + ",".join(f"{each.up_to}={each.algorithm}" for each in self.classes)

    def as_json(self) -> dict[str, Any]:
        """What `load` reads."""
        return {
            "format": FORMAT,
            "ranks_of_hosts": list(self.ranks),
            "classes": [
                {
                    "up_to_bytes": each.up_to,
                    "mode": each.algorithm.mode,
                    "segment_bytes": each.algorithm.segment,
                }
                for each in self.classes
            ],
        }


def ranks_of_hosts(hosts: Sequence[int]) -> tuple[int, ...]:
    """The number of ranks of each host, from the number of each rank's host."""
    return tuple(hosts.count(host) for host in dict.fromkeys(hosts))


def load(path: str) -> Tuning:
    """Reads and checks a file.

    Raises:
        UsageError: It cannot be read, or is wrong; names the file, the field and what is expected.
    """
    try:
        with open(path) as file:
            text = file.read(_MAX_CHARACTERS + 1)
        found = json.loads(text) if len(text) <= _MAX_CHARACTERS else None
    except OSError as error:
        raise UsageError(
            f"MULTIRING_TUNING names {path}, which cannot be read: {error.strerror}; every host needs the "
            "file that `multiring tune` writes, or the variable has to be unset"
        ) from error
    except ValueError as error:
        raise UsageError(f"{path} is no JSON ({error}): write it anew with `multiring tune`") from error
    if len(text) > _MAX_CHARACTERS:
        raise UsageError(f"{path} is longer than what `multiring tune` writes")
    return _Reader(path).tuning(found)


class _Reader:
    def __init__(self, path: str) -> None:
        self._path = path

    def tuning(self, found: Any) -> Tuning:
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            self._refuse("format", f"is not {FORMAT!r}")
        ranks = self._list(found, "ranks_of_hosts")
        for index, number in enumerate(ranks):
            self._require_number(f"ranks_of_hosts[{index}]", number, 1)
        classes: list[SizeClass] = []
        for index, each in enumerate(self._list(found, "classes")):
            classes.append(self._size_class(f"classes[{index}]", each, ranks))
            if index and classes[-1].up_to <= classes[-2].up_to:
                self._refuse(f"classes[{index}].up_to_bytes", "is not larger than that of the class before")
        return Tuning(tuple(ranks), tuple(classes))

    def _size_class(self, field: str, found: Any, ranks: Sequence[int]) -> SizeClass:
        if not isinstance(found, dict):
            self._refuse(field, "is not an object")
        up_to, mode, segment = found.get("up_to_bytes"), found.get("mode"), found.get("segment_bytes", 0)
        self._require_number(f"{field}.up_to_bytes", up_to, 1)
        self._require_number(f"{field}.segment_bytes", segment, 0)
        if not isinstance(mode, str) or not mode:
            self._refuse(f"{field}.mode", f"is not {ROUNDS!r}, {AUTO!r} or a mode such as '2tx4d'")
        if mode == ROUNDS and segment:
            self._refuse(f"{field}.segment_bytes", "has to be 0: rounds have no segments")
        if mode not in (ROUNDS, AUTO):
            self._require_fit(f"{field}.mode", mode, ranks)
        return SizeClass(up_to, Algorithm(mode, segment))

    def _require_fit(self, field: str, mode: str, ranks: Sequence[int]) -> None:
        request = native.PlanRequest()
        request.count, request.mode, request.order = 1, mode, "any"  # the core replaces rings where it has to
        try:
            native.Plan(native.Cluster(list(ranks), [native.Interface(1e9, 0.0)]), request)
        except UsageError as error:
            self._refuse(field, f"does not fit: {error}")

    def _list(self, found: dict[str, Any], name: str) -> list[Any]:
        value = found.get(name)
        if not isinstance(value, list) or not value:
            self._refuse(name, "is not a list of one or more")
        assert isinstance(value, list)
        return value

    def _require_number(self, field: str, value: Any, least: int) -> None:
        if type(value) is not int or not least <= value < 1 << 62:
            self._refuse(field, f"is {value!r}, not an integer of {least} or more")

    def _refuse(self, field: str, why: str) -> None:
        raise UsageError(f"{self._path}: {field} {why}; write the file anew with `multiring tune`")
