"""Each name belongs to one thread: nothing orders what two threads submit."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from multiring.errors import UsageError
from multiring.initialization import at_shutdown
from multiring.tensorflow.graph.library import abort, rank_and_size

__all__ = ["in_py_function", "leave_branch", "reserve", "reserve_at_each_call"]

_Key = tuple[int, str]  # number of the communicator's queue, name

_PARTS = {"CondBranchFuncGraph", "WhileCondFuncGraph", "WhileBodyFuncGraph"}
_lock = threading.Lock()
_owners: dict[_Key, threading.Thread | _Workers] = {}
# What the functions that are being traced, or were, reserve when they are called.
_reservations: weakref.WeakKeyDictionary[Any, _Reservation] = weakref.WeakKeyDictionary()
at_shutdown(_owners.clear)


class _Workers:
    """Owner of what the threads of TensorFlow submit, in which `tf.py_function` runs.

    One for all of them: the functions of a graph run in its order, in whichever thread is free.
    """

    name = "of tf.py_function"

    def is_alive(self) -> bool:
        """There may always be more of them."""
        return True


_workers = _Workers()


def in_py_function() -> bool:
    """Whether this thread is one that Python has not started."""
    thread = threading.current_thread()
    return isinstance(thread, threading._DummyThread) and thread is not threading.main_thread()


def _owner_here() -> threading.Thread | _Workers:
    return _workers if in_py_function() else threading.current_thread()


def reserve(keys: Iterable[_Key]) -> None:
    """The names belong to this thread from now on, until it ends.

    All threads in which `tf.py_function` runs count as one.

    Raises:
        UsageError: One belongs to another thread that lives. The operations of all ranks fail then.
    """
    mine = _owner_here()
    with _lock:
        for key in sorted(keys):
            if rank_and_size(key[0])[1] == 1:
                continue
            owner = _owners.get(key)
            if owner is not None and owner is not mine and owner.is_alive():
                break
            _owners[key] = mine
        else:
            return
    number, name = key
    message = (
        f"'{name}' on rank {rank_and_size(number)[0]} was called from thread '{mine.name}' and belongs to "
        f"thread '{owner.name}': ranks may reach operations of two threads in different order, so that one "
        "thread's would meet the other's; give each thread a communicator of its own (comm.split(0)), or its "
        "operations names of their own"
    )
    abort(number, message)
    raise UsageError(message, rank=rank_and_size(number)[0], tensor=name)


def reserve_at_each_call(graph: Any, key: _Key) -> None:
    """Have the name reserved for each thread that calls the function of this graph. A session of TensorFlow 1
    calls none from Python."""
    if not tf.compat.v1.executing_eagerly_outside_functions():
        return
    while _is_part(graph, _PARTS) and hasattr(graph.outer_graph, "capture_call_time_value"):
        graph = graph.outer_graph  # branches and bodies of loops run in the thread of their function
    if graph.name.startswith("__backward_"):
        return  # made by TensorFlow, in a way that has no place for it; the forward function has reserved
    if graph not in _reservations:
        _reservations[graph] = _Reservation()
        _reservations[graph].attach(graph)
    _reservations[graph].keys.add(key)


def leave_branch(graph: Any) -> None:
    """Hand the reservations of functions that a branch calls to the function around it.

    TensorFlow does so itself, but for the branches of `tf.cond`, which have no place for them.
    """
    if not _is_part(graph, {"CondBranchFuncGraph"}):
        return
    captures = graph.function_captures
    for reservation in [key for key in captures.by_ref_internal if isinstance(key, _Reservation)]:
        _, placeholder, kind = captures.pop(reservation, True)
        outer = reservation.attach(graph.outer_graph)
        captures.add_or_replace(
            key=id(outer), external=outer, internal=placeholder, tracetype=kind, is_by_ref=False
        )


def _is_part(graph: Any, kinds: set[str]) -> bool:
    return not kinds.isdisjoint(kind.__name__ for kind in type(graph).__mro__)


class _Reservation:
    """The names of one function, reserved when it is called from Python."""

    def __init__(self) -> None:
        self.keys: set[_Key] = set()
        self._checked: tuple[threading.Thread | _Workers, int] | None = None
        with tf.init_scope():
            self._zero = tf.constant(0)

    def attach(self, graph: Any) -> Any:
        """Make the function of this graph call this object whenever it is called; its value there."""
        with graph.as_default():
            return graph.capture_call_time_value(
                self, tf.TensorSpec([], tf.int32), key=self, default_value=self._zero
            )

    def __call__(self) -> Any:
        """Runs at each call, in the thread of the caller. Nothing depends on the value."""
        state = _owner_here(), len(self.keys)
        if self._checked != state:
            reserve(self.keys)
            self._checked = state
        return self._zero
