"""The log of this package, and how its lines look where the program has set up none."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from types import FrameType

__all__ = ["announce", "configure_log", "is_of_program", "warn_program"]

_log = logging.getLogger("multiring")
_PYTHON = ("<", os.path.dirname(os.__file__) + os.sep)  # what its files begin with, compiled ones first
_ANNOUNCED = "is_announced"  # attribute of records that say something, and warn of nothing


class _ToStderr(logging.Handler):
    """Writes "multiring: warning: ..." as long as the program has no handlers of its own, which then decide
    how lines look."""

    def emit(self, record: logging.LogRecord) -> None:
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return
            logger = logger.parent if logger.propagate else None
        try:
            if sys.stderr is not None:
                level = "" if getattr(record, _ANNOUNCED, False) else f"{record.levelname.lower()}: "
                print(f"multiring: {level}{self.format(record)}", file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def configure_log(level: str) -> None:
    """Writes messages from this level on, "debug" to "error", to stderr if the program has no handlers."""
    _log.setLevel(level.upper())
    if not any(isinstance(handler, _ToStderr) for handler in _log.handlers):
        _log.addHandler(_ToStderr())


def announce(message: str) -> None:
    """Writes a message that is no warning, and yet for every user: unless errors alone are asked for."""
    if _log.isEnabledFor(logging.WARNING):
        record = _log.makeRecord(
            *(_log.name, logging.INFO, __file__, 0, message, (), None),
            extra={_ANNOUNCED: True},
        )
        _log.handle(record)


def is_of_program(frame: FrameType) -> bool:
    """Whether it is a frame of the user's program: of neither multiring, nor packages, nor Python."""
    file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
    return (
        module.partition(".")[0] != "multiring" and "-packages" not in file and not file.startswith(_PYTHON)
    )


def warn_program(message: str) -> None:
    """Warns of what the program does, at its own line that has led here."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and not is_of_program(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
