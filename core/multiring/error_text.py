"""Errors on their way through a framework that hands on nothing but their text.

The text has a number, under which the error itself is kept: "multiring error 17: PeerLostError: rank 0 ...".
What native code reports is kept by the queue that it submits to, and `mr_error_text` of the C ABI writes the
text; what Python reports is kept here. The last few of each are.
"""

from __future__ import annotations

import itertools
import re
from collections import deque

from multiring import _core, errors
from multiring.errors import MultiringError
from multiring.named_queue import NamedQueue

__all__ = ["address_for_native_code", "find_error", "text_of"]

# What frameworks add stands in lines or brackets of its own.
_TEXT = re.compile(r"multiring(?: error (p?)(\d+))?: (\w+Error): (.*?)(?=\n|\s*\[Op:|\s*\[\[|$)")
_COMPARED = 80  # characters of an error's text

_addresses: list[int] = []  # of all queues of the process that native code knows
_numbers = itertools.count(1)
_kept: deque[tuple[int, MultiringError]] = deque(maxlen=16)


def address_for_native_code(queue: NamedQueue) -> int:
    """The `mr_queue*` of a queue for native code, whose errors `find_error` then finds."""
    _addresses.append(queue.address)
    return queue.address


def text_of(error: MultiringError) -> str:
    """A text for a framework, by which `find_error` finds this error again."""
    number = next(_numbers)
    _kept.append((number, _copy(error)))  # not what its traceback holds
    return f"multiring error p{number}: {type(error).__name__}: {error}"


def find_error(text: str) -> MultiringError | None:
    """The exception that a framework's text tells of, with all attributes; None where it tells of none.

    Where the error is not kept any more, or another process keeps it, it is made of the text and has none.
    """
    found = _TEXT.search(text)
    kind = getattr(errors, found[3], None) if found is not None else None
    if found is None or kind is None:
        return None
    message = found[4].strip()
    for error in _kept_under(int(found[2]), by_python=bool(found[1])) if found[2] else ():
        if type(error) is kind and str(error).startswith(message[:_COMPARED]):  # no other process's number
            return error
    made: MultiringError = kind(message)
    return made


def _kept_under(number: int, *, by_python: bool) -> list[MultiringError]:
    if by_python:
        return [_copy(error) for known, error in tuple(_kept) if known == number]
    found = [_core.NamedQueue.kept_error(address, number) for address in _addresses]
    return [error for error in found if error is not None]


def _copy(error: MultiringError) -> MultiringError:
    copy = type(error)(str(error))
    copy.__dict__.update(vars(error))
    return copy
