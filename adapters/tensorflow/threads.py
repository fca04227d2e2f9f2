"""Each name belongs to one thread: nothing orders what two threads submit."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from multiring.errors import UsageError
from multiring.initialization import at_shutdown
from multiring.tensorflow.library import abort, place_of

__all__ = ["claim", "claim_at_each_call"]

_Key = tuple[int, str]  # number of the communicator's queue, name

_lock = threading.Lock()
_owners: dict[_Key, threading.Thread] = {}
# What the functions that are being traced, or were, claim when they are called.
_claims: weakref.WeakKeyDictionary[Any, _Claim] = weakref.WeakKeyDictionary()
at_shutdown(_owners.clear)


def claim(keys: Iterable[_Key]) -> None:
    """The names belong to this thread from now on, until it ends.

    Raises:
        UsageError: One belongs to another thread that lives. The operations of all ranks fail then.
    """
    mine = threading.current_thread()
    if isinstance(mine, threading._DummyThread):
        return  # one of TensorFlow's, which runs a tf.py_function in the order of the graph
    with _lock:
        for key in keys:
            if place_of(key[0])[1] == 1:
                continue
            owner = _owners.get(key)
            if owner is not None and owner is not mine and owner.is_alive():
                break
            _owners[key] = mine
        else:
            return
    number, name = key
    message = (
        f"'{name}' on rank {place_of(number)[0]} was called from thread '{mine.name}' and belongs to thread "
        f"'{owner.name}': ranks may reach operations of two threads in different order, so that one thread's would "
        "meet the other's; give each thread a communicator of its own (comm.split(0)), or its operations "
        "names of their own"
    )
    abort(number, message)
    raise UsageError(message)


def claim_at_each_call(graph: Any, key: _Key) -> None:
    """Have the name claimed by each thread that calls the function of this graph."""
    while hasattr(getattr(graph, "outer_graph", None), "capture_call_time_value") and _is_part(graph):
        graph = graph.outer_graph  # branches and bodies of loops run in the thread of their function
    if graph.name.startswith("__backward_"):
        return  # made by TensorFlow, in a way that has no place for it; the forward function has claimed
    if graph not in _claims:
        _claims[graph] = _Claim()
    _claims[graph].add(graph, key)


def _is_part(graph: Any) -> bool:
    names = {kind.__name__ for kind in type(graph).__mro__}
    return not names.isdisjoint({"CondBranchFuncGraph", "WhileCondFuncGraph", "WhileBodyFuncGraph"})


class _Claim:
    """The names of one graph, claimed when the function is called from Python."""

    def __init__(self) -> None:
        self._keys: set[_Key] = set()
        self._checked: tuple[threading.Thread, int] | None = None

    def add(self, graph: Any, key: _Key) -> None:
        """Take in another name; the first time, make the graph call this object."""
        if not self._keys:
            with tf.init_scope():
                zero = tf.constant(0)
            self._zero = zero
            with graph.as_default():
                graph.capture_call_time_value(self, tf.TensorSpec([], tf.int32), key=self, default_value=zero)
        self._keys.add(key)

    def __call__(self) -> Any:
        """Runs at each call, in the thread of the caller. What the graph makes of the value does not matter."""
        state = threading.current_thread(), len(self._keys)
        if self._checked != state:
            claim(self._keys)
            self._checked = state
        return self._zero
