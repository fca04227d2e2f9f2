"""What the commands take for numbers, times and sizes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from multiring.commands.argument_types import array_sizes, number_of, wall_seconds


def test_what_is_accepted() -> None:
    assert [number_of("ranks")(text) for text in ("1", "12", "007")] == [1, 12, 7]
    assert [wall_seconds(text) for text in ("1", "0.5", "1e-9", "3600")] == [1, 0.5, 1e-9, 3600]
    assert array_sizes("1MiB,4, 64K ,4,8B") == [2**20, 4, 2**16, 8]


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        (number_of("turns"), "0", "'0' is not a number of turns: give an integer of at least 1"),
        *((number_of("ranks"), text, "is not a number of ranks") for text in ("", "1.0")),
        *((wall_seconds, text, "is not a time: give seconds") for text in ("0", "nan", "s")),
        *((array_sizes, text, "multiple of 4 bytes, at least 4") for text in ("6", "0K")),
        *((array_sizes, text, "is not a size: give bytes") for text in ("4,", "1Q")),
    ],
)
def test_what_is_refused(kind: Callable[[str], Any], text: str, told: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=told):
        kind(text)
