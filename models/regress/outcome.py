"""What has become of a task, as the process that started the job sees it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Failure", "Outcome", "Outcomes", "State", "TaskKey", "read_error", "read_outcome"]

Array = npt.NDArray[Any]


class State(StrEnum):
    """How a task has ended."""

    DONE = "done"
    UNAVAILABLE = "unavailable"
    FAILED = "failed"
    HUNG = "hung"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Outcome:
    """How a task has ended, and with what.

    Attributes:
        state: How.
        why: What went wrong, or is lacking, in a line.
        detail: More of it: the end of the job's output.
        seconds: How long it took.
        values: As the task gave them.
        hashes: By rank, then by name.
        arrays: By name.
    """

    state: State
    why: str = ""
    detail: str = ""
    seconds: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)
    hashes: tuple[dict[str, str], ...] = ()
    arrays: dict[str, Array] = field(default_factory=dict)


TaskKey = tuple[str, int, str]
"""Framework, ranks, task."""

Outcomes = dict[TaskKey, Outcome]


def read_outcome(directory: Path, task: str) -> Outcome | None:
    """What the ranks have handed over for a task; None: nothing."""
    path = directory / f"{task}.json"
    if not path.exists():
        return None
    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return Outcome(
        State(fields["state"]),
        why=fields.get("why", ""),
        seconds=fields.get("seconds", 0.0),
        values=fields.get("values", {}),
        hashes=tuple(fields.get("hashes", ())),
        arrays=_arrays(path.with_suffix(".npz")),
    )


def _arrays(path: Path) -> dict[str, Array]:
    if not path.exists():
        return {}
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


@dataclass(frozen=True)
class Failure:
    """What a rank has said that failed.

    Attributes:
        text: Rank and error, in a line.
        trace: Where it was.
        is_consequence: Whether another rank's end has caused it.
    """

    text: str
    trace: str
    is_consequence: bool


def read_error(directory: Path, task: str) -> Failure | None:
    """What has failed in a task: a cause before consequences, a low rank before a high one; None: nothing."""
    found = []
    for path in directory.glob(f"{task}.rank-*.error"):
        fields = json.loads(path.read_text(encoding="utf-8"))
        rank = int(path.name.removeprefix(f"{task}.rank-").removesuffix(".error"))
        failure = Failure(f"rank {rank}: {fields['text']}", fields["trace"], bool(fields["late"]))
        found.append((failure.is_consequence, rank, failure))
    return min(found, key=lambda each: each[:2])[2] if found else None
