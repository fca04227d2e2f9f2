"""What a check of `multiring doctor` has found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["Finding", "Status"]


class Status(Enum):
    """How a check went; only FAILED keeps a job from running."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        status: How it went.
        detail: What is there.
        fix: What to do about it; empty if nothing.
        also: What was looked at because of what is there, by name.
    """

    status: Status
    detail: str
    fix: str = ""
    also: Mapping[str, Finding] = field(default_factory=dict)
