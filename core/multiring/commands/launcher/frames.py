"""What goes from another host's ranks to the launcher: a greeting, and then frames.

A frame is `FRAME` with kind, rank and length, and so many bytes. They are what a rank has written, or, when
that is all, how it has ended. The greeting comes behind whatever a login shell may say.
"""

from __future__ import annotations

import struct

__all__ = ["END", "FRAME", "GREETING", "STREAMS"]

GREETING = b"\0multiring remote host\n"
FRAME = struct.Struct("!BII")
STREAMS = ("stdout", "stderr")  # kinds 0 and 1
END = 2  # its bytes are the exit code, or minus a signal, in digits
