"""Types of command-line arguments that several commands share.

All raise argparse.ArgumentTypeError, which says what was given and what is wanted.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from multiring import units

__all__ = ["ITEM", "array_sizes", "number_of", "wall_seconds"]

ITEM = 4
"""Bytes of a float32."""


def number_of(things: str) -> Callable[[str], int]:
    """The type of a number of at least 1 of those things ("ranks")."""

    def number(text: str) -> int:
        if not (text.isdecimal() and int(text) >= 1):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a number of {things}: give an integer of at least 1"
            )
        return int(text)

    return number


def wall_seconds(text: str) -> float:
    """Seconds that something may take, as `0.5` or `3600`."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (seconds > 0 and math.isfinite(seconds)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: give seconds, more than 0")
    return seconds


def array_sizes(text: str) -> list[int]:
    """Bytes of arrays of float32, as `4,64K,1MiB`; each once, in the order given."""
    sizes = [_array_size(part) for part in text.split(",")]
    return list(dict.fromkeys(sizes))


def _array_size(text: str) -> int:
    size = units.size(text)
    if size == 0 or size % ITEM:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size of an array of float32: give a multiple of {ITEM} bytes, at least {ITEM}"
        )
    return size
