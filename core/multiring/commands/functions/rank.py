"""What each rank of `multiring.run` executes: `main([CALL, RESULT, RESULT, ...])`.

The numbers are those of inherited descriptors: of the call, and for each rank of the file for its result.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from multiring import config
from multiring.commands.functions import memory, pickling
from multiring.commands.functions.outcome import Raised, Returned
from multiring.console.traceback_hook import traceback_text
from multiring.rendezvous.joined import tell_end

__all__ = ["main"]


def main(arguments: Sequence[str]) -> None:
    """Calls the function, and leaves what it returns or raises in the file for it.

    Raises:
        BaseException: What the function raises: this process ends as a program does that raises it.
    """
    call_file, *result_files = map(int, arguments)
    result_file = result_files.pop(int(os.environ["MULTIRING_RANK"]))
    for descriptor in result_files:
        os.close(descriptor)
    for descriptor in (call_file, result_file):
        os.set_inheritable(descriptor, False)  # processes that the function starts may outlive this one
    try:
        value = _call(call_file)
        _leave(value, result_file)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        _leave(None, result_file)
    except BaseException as error:
        text = _trimmed(error)
        memory.write(result_file, Raised.of(error, text))
        with contextlib.suppress(Exception):  # the error itself is what counts
            tell_end(config.load())
        sys.excepthook = _writer(text)
        raise


def _call(file: int) -> Any:
    parts = memory.read(file)
    sys.argv[:] = next(parts)
    try:
        function, args, kwargs = next(parts)
    except Exception as error:
        raise pickle.UnpicklingError(
            f"the function or its arguments cannot be unpickled on a rank ({type(error).__name__}: {error}): "
            f"what they need has to be importable there{pickling.ADVICE}"
        ) from error
    parts.close()
    os.close(file)
    return function(*args, **kwargs)


def _leave(value: Any, file: int) -> None:
    try:
        memory.write(file, Returned(value))
    except Exception as error:
        raise pickle.PicklingError(
            f"what the function has returned ({type(value).__name__}) cannot be pickled, "
            f"{type(error).__name__}: {error}{pickling.ADVICE}"
        ) from error


def _trimmed(error: BaseException) -> str:
    """The traceback, without the frames of this module at its beginning."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return traceback_text(error, frames or error.__traceback__, full=config.shows_full_tracebacks())


def _writer(text: str) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
    """An excepthook: Python's own would show the frames that have led here as well."""

    def hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        print(text, file=sys.stderr, end="", flush=True)

    return hook
