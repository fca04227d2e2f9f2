"""Ranks that wait for one another in operations that cannot meet.

Rank 0 has left a loop and waits in a barrier; rank 1 waits for gradients of rank 0. Both would wait until the
deadline. When a wait has lasted so long that the core warns, a thread here tells the ranks that are awaited,
by the launcher's store, in which operation and at which line of the program this rank waits. It is proven
that two ranks wait for one another if

- in both processes one thread alone has ever communicated, and no other one is in the program's own code or
  a timer that may call it, so that nothing else can begin an operation,
- that thread is in a call without a timeout that only the operation in question ends, and
- each rank has seen what the other one tells, and was in its call before that and after it.

Then both calls raise MismatchError. Ranks whose threads wait in a framework, as in compiled functions of JAX
and TensorFlow, cannot prove anything, and wait until the deadline; so do ranks of other launchers.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from multiring import _core, errors
from multiring.log import is_of_program
from multiring.store import OTHER_SECRET, Store, open_store

if TYPE_CHECKING:
    from multiring.settings import Settings

__all__ = ["tell", "watch_waits"]

_log = logging.getLogger("multiring")

_LOOK_SECONDS = 0.5
_STORE_SECONDS = 5.0
_lock = threading.Lock()
_is_watching = False


class _Wait(NamedTuple):
    """The call that this process is in, and the one operation that it waits for."""

    call: int
    number: int
    communicator: str
    operation: str
    on: Any
    late: Any


def tell(message: str) -> None:
    """Writes a warning into the log, and where the user's program is."""
    where = _calling_line()
    _log.warning("%s%s", message, f" (this rank is at {where})" if where else "")


def watch_waits(settings: Settings) -> None:
    """Have a thread look whether this rank and another one wait for each other, as long as the program is in
    the call that it is in now."""
    global _is_watching
    if not (settings.store and settings.secret) or (wait := _current_wait()) is None:
        return
    with _lock:
        if _is_watching:
            return
        _is_watching = True
    watch = threading.Thread(target=_watch, args=(settings, wait), name="multiring-waits", daemon=True)
    try:
        watch.start()
    except RuntimeError:  # no thread is left
        _is_watching = False


def _current_wait() -> _Wait | None:
    """Return the one operation that this process waits in; None: none, several, or unknown."""
    threads, call, number = _core.program_calls()
    begun = _core.waits()
    if threads != 1 or len(begun) != 1 or _count_program_threads() > 1:
        return None
    wait = _Wait(call, *begun[0])
    return wait if wait.number == number and wait.late else None


def _watch(settings: Settings, wait: _Wait) -> None:
    global _is_watching
    try:
        with (
            suppress(errors.MultiringError, OSError, ValueError),  # the job works without it
            open_store(
                settings.store, settings.secret, _STORE_SECONDS, OTHER_SECRET, _STORE_SECONDS
            ) as store,
        ):
            _look(store, wait)
    finally:
        _is_watching = False


def _count_program_threads() -> int:
    """Threads that are in the program's own code or will be, whether they have communicated or not."""
    count = sum(isinstance(each, threading.Timer) for each in threading.enumerate())
    for bottom in sys._current_frames().values():
        frame: FrameType | None = bottom
        while frame is not None and not is_of_program(frame):
            frame = frame.f_back
        count += frame is not None
    return count


def _look(store: Store, wait: _Wait) -> None:
    """Tell in which call this rank is, and look what those tell that it waits for, until the call ends."""
    own, at = _key(wait.on), _calling_line()
    seen: dict[str, int] = {}
    while (now := _current_wait()) is not None and now[:2] == wait[:2]:
        wait = now
        late = [_key(place) for place in wait.late]
        mine = {"rank": wait.on[0], "communicator": wait.communicator, "operation": wait.operation, "at": at}
        store.set(own, json.dumps(mine | {"call": wait.call, "late": late, "seen": seen}).encode())
        told = {key: theirs for key in late if (theirs := _told(store, key)) is not None}
        seen = {key: theirs["call"] for key, theirs in told.items()}
        for theirs in told.values():
            if _waits_for(theirs, own, wait) and _current_wait() == wait:
                # At once, since the process of the first rank whose call raises may end.
                _core.fail_waits([theirs["communicator"], wait.communicator], _text(mine, theirs))
                return
        time.sleep(_LOOK_SECONDS)
    store.forget(own)


def _waits_for(theirs: Any, own: str, wait: _Wait) -> bool:
    """Whether a rank waits for this one in another operation, and has told so since this call began."""
    return (
        own in theirs["late"]
        and theirs["communicator"] != wait.communicator
        and theirs["seen"].get(own) == wait.call
    )


def _told(store: Store, key: str) -> Any:
    """Return the state that a rank has published; None: there is none."""
    try:
        return json.loads(store.get(key, 0.0))
    except errors.TimeoutError:
        return None


def _key(place: Any) -> str:
    """The key of a process: all ranks know its host and number there."""
    _, host, process = place
    return f"waits/{host}/{process}"


def _text(mine: Any, theirs: Any) -> str:
    def waits(one: Any) -> str:
        return f"{one['rank']} in {one['operation']}" + (f" ({one['at']})" if one["at"] else "")

    return (
        f"{waits(mine)} and {waits(theirs)} wait for one another, and cannot meet. Make the same calls in "
        "the same order on all ranks: most often one has fewer batches (hooks.join(), or 'Uneven data' in "
        "the guide of your framework), or a call stands behind `if comm.rank == 0:`"
    )


def _calling_line() -> str:
    """File and line where the main thread is outside of installed packages, and which function of ours it has
    called there; empty: not known."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    called = ""
    while frame is not None:
        if is_of_program(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}{called}"
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] == "multiring":
            called = f", in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
