"""How a rank shows the exception that ends it: without the lines of multiring itself, and in one piece."""

from __future__ import annotations

import builtins
import difflib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any

from multiring import config
from multiring.errors import MultiringError, RankError
from multiring.log import is_of_program

__all__ = ["RankTraceback", "install_hook", "shown_if_uncaught", "traceback_text"]

_PACKAGE = "multiring"
_FRAMEWORKS = ("jax", "jaxlib", "keras", "tensorflow")  # of whose errors the program makes none itself
_DIRECT_CAUSE = "\n\nThe above exception was the direct cause of the following exception:\n\n"


class RankTraceback(Exception):
    """The traceback of an exception on a rank, as text. The cause of the exception in this process."""

    def __str__(self) -> str:
        return f"\n{self.args[0].rstrip()}"


def install_hook(kind: str, tell_end: Callable[[], None] = lambda: None) -> None:
    """Shows uncaught exceptions like this from now on, where the program has not set `sys.excepthook`.

    Args:
        kind: "short", or "full": as Python does.
        tell_end: Called before one is shown.
    """
    own = getattr(sys.excepthook, "func", None) is _tell_and_show
    if own or sys.excepthook in (sys.__excepthook__, _show):
        show = _show if kind == "short" and not _is_own_program() else sys.__excepthook__
        sys.excepthook = partial(_tell_and_show, tell_end, os.getpid(), show)


@contextmanager
def shown_if_uncaught() -> Iterator[None]:
    """Context that shows uncaught exceptions like this once an error of multiring, or Ctrl-C, has left it,
    where the program has not set `sys.excepthook`."""
    try:
        yield
    except (MultiringError, KeyboardInterrupt):
        if sys.excepthook is sys.__excepthook__ and not config.shows_full_tracebacks():
            sys.excepthook = _show
        raise


def _tell_and_show(
    tell_end: Callable[[], None],
    process: int,
    show: Callable[..., Any],
    kind: type[BaseException],
    error: BaseException,
    frames: TracebackType | None,
) -> None:
    if os.getpid() == process:  # a fork of the rank is none
        with suppress(Exception, KeyboardInterrupt):  # the error itself is what counts
            tell_end()
    with _without_interrupts():
        show(kind, error, frames)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Context in which Ctrl-C has no effect: the process is ending, and its error is to be shown whole."""
    before = None
    for _ in range(2):  # the first call may raise for a Ctrl-C that has just come
        with suppress(KeyboardInterrupt, ValueError):  # the main thread alone is interrupted
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
            break
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def traceback_text(error: BaseException, frames: TracebackType | None, *, full: bool = False) -> str:
    """An exception with its traceback, as Python shows it, but for frames of multiring unless `full`.

    Unless `full`, an error of a framework that has come of one of multiring is shown as that one, and that of
    `multiring.run` with the traceback of the rank alone.
    """
    shown = (
        traceback.TracebackException(type(error), error, frames) if full else _shortened(error, frames, set())
    )
    if meant := _suggestion(error, frames):
        shown._str += meant  # type: ignore[attr-defined]  # before notes, which `format` adds
    of_rank = "" if full else _text_of_rank(error)
    before = f"{of_rank.rstrip()}{_DIRECT_CAUSE}" if of_rank else ""
    return before + "".join(shown.format(chain=not before)).rstrip("\n") + "\n"


def _text_of_rank(error: BaseException) -> str:
    """The traceback that `multiring.run` has got of a rank; empty: it is another error."""
    if not isinstance(error, RankError):
        return ""
    causes = (error.__cause__, getattr(error.__cause__, "__cause__", None))
    return next((str(cause).lstrip("\n") for cause in causes if isinstance(cause, RankTraceback)), "")


def _lines_for_ipython(error: RankError) -> list[str]:
    frames = error.__traceback__
    while frames is not None and "IPython" in str(frames.tb_frame.f_globals.get("__name__")):
        frames = frames.tb_next
    return traceback_text(error, frames, full=config.shows_full_tracebacks()).splitlines()


# IPython asks an error for it; here, as errors know nothing of how they are shown.
RankError._render_traceback_ = _lines_for_ipython  # type: ignore[attr-defined]


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
    whose = _PACKAGE

    def format(self, **how: Any) -> list[str]:
        frames = "1 frame" if self.hidden == 1 else f"{self.hidden} frames"
        return [
            *super().format(**how),
            f"  ({frames} of {self.whose} not shown; MULTIRING_TRACEBACK=full shows all)\n",
        ]


def _shortened(
    error: BaseException, frames: TracebackType | None, seen: set[int]
) -> traceback.TracebackException:
    """An exception as it is shown, without frames that tell nothing, and without those of `seen` before it,
    which are shown already: this is added. Errors may be causes of each other."""
    seen.add(id(error))
    own = _carried(error)
    if own is None:
        shown = traceback.TracebackException(type(error), error, frames)
        _shorten(shown, error, frames, seen)
        return shown
    shown = traceback.TracebackException(type(own), own, frames)
    is_hidden = [not is_of_program(frame) for frame, _ in traceback.walk_tb(frames)]
    _hide(shown, is_hidden, f"{_PACKAGE} and of installed packages")
    shown.__cause__ = None
    shown.__context__ = _shown_before(error, seen)
    shown.__suppress_context__ = False
    return shown


def _shown_before(error: BaseException, shown: set[int]) -> traceback.TracebackException | None:
    """What came before a framework's error that tells of one of multiring, and tells of something else."""
    told, seen = _told(error), {id(error)}
    before = _before(error)
    while before is not None and id(before) not in seen and _told(before) == told:
        seen.add(id(before))
        before = _before(before)
    return (
        None
        if before is None or id(before) in seen | shown
        else _shortened(before, before.__traceback__, shown)
    )


def _told(error: BaseException) -> str | None:
    """The text of the error of multiring that this is, or that it tells of; None: of none."""
    own = error if isinstance(error, MultiringError) else _carried(error)
    return None if own is None else str(own)


def _before(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _carried(error: BaseException) -> MultiringError | None:
    """The error of multiring that a framework's error tells of; None for one that the program has made."""
    with suppress(Exception):  # of a __str__ that fails
        if isinstance(error, MultiringError) or "multiring error " not in (text := str(error)):
            return None
        from multiring.error_text import find_error

        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        of_framework = type(error).__module__.partition(".")[0] in _FRAMEWORKS
        if of_framework or not frames or not is_of_program(frames[-1]):
            return find_error(text)
    return None


def _hide(shown: traceback.TracebackException, is_hidden: Sequence[bool], whose: str) -> None:
    if any(is_hidden) and not all(is_hidden) and len(is_hidden) == len(shown.stack):
        stack = _Stack(each for each, hidden in zip(shown.stack, is_hidden, strict=True) if not hidden)
        stack.hidden, stack.whose = sum(is_hidden), whose
        shown.stack = stack


def _shorten(
    shown: traceback.TracebackException, error: BaseException, frames: TracebackType | None, seen: set[int]
) -> None:
    """Leaves out frames of multiring where its own error says what was wrong, or Ctrl-C; else they may."""
    seen.add(id(error))
    if isinstance(error, MultiringError | KeyboardInterrupt):
        ours = [_is_ours(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(frames)]
        if isinstance(error, KeyboardInterrupt) and any(ours):  # nor where in a wait of ours it came
            ours[ours.index(True) :] = [True] * (len(ours) - ours.index(True))
        _hide(shown, ours, _PACKAGE)
    for name in ("__cause__", "__context__"):
        part, inner = getattr(shown, name), getattr(error, name)
        if part is None or inner is None:
            continue
        told = _told(inner)
        if told is not None and isinstance(error, MultiringError) and told in str(error):
            setattr(shown, name, _shown_before(inner, seen))  # it says the same
        elif _carried(inner) is None:
            _shorten(part, inner, inner.__traceback__, seen)
        else:
            setattr(shown, name, None if id(inner) in seen else _shortened(inner, inner.__traceback__, seen))
    if isinstance(error, BaseExceptionGroup):
        for each, inner in zip(shown.exceptions or (), error.exceptions, strict=False):
            _shorten(each, inner, inner.__traceback__, seen)


def _is_ours(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] == _PACKAGE


def _is_own_program() -> bool:
    """Whether this process runs a command of multiring, of which nothing else would be left."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return (
        _is_ours(getattr(spec, "name", None)) or os.path.basename(sys.argv[0] if sys.argv else "") == _PACKAGE
    )
