"""The native handlers: found, registered with XLA, and the queue that they submit to."""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from multiring import _core, initialization
from multiring.derived import reserve_name, shared_queue
from multiring.error_text import address_for_native_code
from multiring.errors import InternalError, UsageError
from multiring.jax.internals import ThreadEffect, forget_failed_programs
from multiring.lazy import made_once

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["CHECK", "DONE", "ENTER", "PLATFORMS", "START", "library", "number_of", "thread_effect"]

START, DONE, CHECK, ENTER = "multiring_start", "multiring_done", "multiring_check", "multiring_enter"
# Where programs with collectives run, as JAX calls it, and as its registry of handlers does.
PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}

_leaving = False
# Number of the queue of each communicator that has been used; the communicator itself holds the queue.
_numbers: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()
_communicators: dict[int, weakref.ref[Communicator]] = {}  # by these numbers


@made_once
def library() -> ctypes.CDLL:
    """The native handlers, which are made known to XLA once per process.

    Raises:
        InternalError: The library is missing from the installation.
        UsageError: JAX refuses it, since it speaks another version of the foreign-function interface.
    """
    path = Path(_core.__file__).parent / "jax" / "libmultiring_jax.so"
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise InternalError(
            f"the native part of multiring.jax does not load; reinstall multiring: {error}"
        ) from error
    for target, (platform, registry) in itertools.product((START, DONE, CHECK, ENTER), PLATFORMS.items()):
        symbol = target.replace("multiring_", "multiring_jax_")
        if platform != "cpu" and target != ENTER:  # which touches no array
            symbol += f"_{platform}"
        try:
            capsule = jax.ffi.pycapsule(getattr(loaded, symbol))
            jax.ffi.register_ffi_target(target, capsule, platform=registry)
        except Exception as error:
            raise UsageError(
                f"JAX {jax.__version__} does not accept the handlers of this multiring ({error}); update "
                "multiring, or install an older JAX"
            ) from error
    _core.tell_sites()
    initialization.at_shutdown(_invalidate)
    # Handlers run in the reverse order: this one before JAX waits for programs, whose errors have been
    # reported already, and before the world is left.
    atexit.register(_leave)
    loaded.multiring_jax_register_queue.argtypes = [ctypes.c_void_p]
    loaded.multiring_jax_register_queue.restype = ctypes.c_int64
    loaded.multiring_jax_pending_calls.restype = ctypes.c_int64
    return loaded


def number_of(comm: Communicator, name: str = "") -> int:
    """Number under which programs refer to the queue that a communicator's collectives go through.

    Collective at the first call. `name` is what a call is matched by; nothing where that is its place. It
    belongs to the thread that calls or traces it.
    """
    reserve_name(comm, "queue", name)
    if comm not in _numbers:
        address = address_for_native_code(shared_queue(comm, "queue"))
        # Of two threads that come here at once, both register it: one number is kept.
        _numbers.setdefault(comm, int(library().multiring_jax_register_queue(address)))
        _communicators[_numbers[comm]] = weakref.ref(comm)
    return _numbers[comm]


@functools.lru_cache(maxsize=4096)
def thread_effect(queue: int, name: str) -> ThreadEffect:
    """The effect of a program that uses a name, as `number_of` takes it: the name belongs to the thread that
    runs the program."""

    def check() -> None:
        reference = _communicators.get(queue)  # of a program of another process there is none
        comm = reference() if reference is not None else None
        if comm is not None:
            reserve_name(comm, "queue", name)

    return ThreadEffect((queue, name), check)


def _invalidate() -> None:
    """The world ends. Compiled programs hold the numbers of its queues: compile them anew for the next."""
    forget_failed_programs()
    if not _leaving:
        jax.clear_caches()


def _leave() -> None:
    global _leaving
    _leaving = True
    forget_failed_programs()
