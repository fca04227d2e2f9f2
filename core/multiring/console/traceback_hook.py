"""How a rank shows the exception that ends it: without the lines of multiring itself, and in one piece."""

from __future__ import annotations

import builtins
import difflib
import os
import sys
import traceback
from types import TracebackType
from typing import Any

from multiring.errors import MultiringError

__all__ = ["install_hook", "traceback_text"]

_PACKAGE = "multiring"


def install_hook(kind: str) -> None:
    """Shows uncaught exceptions like this from now on, where the program has not set `sys.excepthook`.

    Args:
        kind: "short", or "full": as Python does, which stays.
    """
    if kind == "short" and sys.excepthook is sys.__excepthook__ and not _is_own_program():
        sys.excepthook = _show


def traceback_text(error: BaseException, frames: TracebackType | None, *, full: bool = False) -> str:
    """An exception with its traceback, as Python shows it, but for frames of multiring unless `full`."""
    shown = traceback.TracebackException(type(error), error, frames)
    if not full:
        _shorten(shown, error, frames)
    if meant := _suggestion(error, frames):
        shown._str += meant  # type: ignore[attr-defined]  # before notes, which `format` adds
    return "".join(shown.format()).rstrip("\n") + "\n"


def _show(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    try:
        text = traceback_text(error, frames)
        if sys.stderr.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb":
            at = text.rfind("".join(traceback.format_exception_only(error)).rstrip("\n"))
            if at >= 0:
                text = f"{text[:at]}\x1b[1;31m{text[at:].rstrip()}\x1b[0m\n"
        sys.stderr.write(text)  # at once: other ranks may write there, too
        sys.stderr.flush()
    except Exception:  # an error is never lost for its looks
        sys.__excepthook__(kind, error, frames)


def _suggestion(error: BaseException, frames: TracebackType | None) -> str:
    """What Python's own hook says of a misspelt name, which `traceback` leaves out before 3.12."""
    if sys.version_info >= (3, 12) or not isinstance(error, AttributeError | NameError) or not error.name:
        return ""
    names: list[str] = []
    if isinstance(error, AttributeError):
        names = dir(error.obj) if error.obj is not None else []
    else:
        for frame, _ in traceback.walk_tb(frames):
            names = [*frame.f_locals, *frame.f_globals, *dir(builtins)]
    near = difflib.get_close_matches(error.name, names, n=1)
    return f". Did you mean: {near[0]!r}?" if near else ""


class _Stack(traceback.StackSummary):
    """Frames that are shown, and how many are not."""

    hidden = 0

    def format(self, **how: Any) -> list[str]:
        frames = "1 frame" if self.hidden == 1 else f"{self.hidden} frames"
        return [
            *super().format(**how),
            f"  ({frames} of multiring not shown; MULTIRING_TRACEBACK=full shows all)\n",
        ]


def _shorten(shown: traceback.TracebackException, error: BaseException, frames: TracebackType | None) -> None:
    """Leaves out frames of multiring where its own error says what was wrong; else they may."""
    ours = [_is_ours(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(frames)]
    if isinstance(error, MultiringError) and any(ours) and not all(ours) and len(ours) == len(shown.stack):
        stack = _Stack(each for each, own in zip(shown.stack, ours, strict=True) if not own)
        stack.hidden = sum(ours)
        shown.stack = stack
    for part, cause in ((shown.__cause__, error.__cause__), (shown.__context__, error.__context__)):
        if part is not None and cause is not None:
            _shorten(part, cause, cause.__traceback__)
    if isinstance(error, BaseExceptionGroup):
        for each, inner in zip(shown.exceptions or (), error.exceptions, strict=False):
            _shorten(each, inner, inner.__traceback__)


def _is_ours(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] == _PACKAGE


def _is_own_program() -> bool:
    """Whether this process runs a command of multiring, of which nothing else would be left."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return (
        _is_ours(getattr(spec, "name", None)) or os.path.basename(sys.argv[0] if sys.argv else "") == _PACKAGE
    )
