"""Names by which the ranks' operations find each other.

Ranks trace the same functions, but not equally often: a last batch of another size makes one rank trace
anew. So names count operations within a trace, never over the whole process; the k-th run of a name on one
rank meets the k-th on the others.
"""

from __future__ import annotations

import re
import threading
import weakref
from typing import Any

import tensorflow as tf
from multiring.tensorflow.graph.threads import in_py_function

__all__ = ["operation_name"]

# Operations so far in each function, branch or body of a loop that is being traced.
_counts: weakref.WeakKeyDictionary[Any, dict[tuple[str, int], int]] = weakref.WeakKeyDictionary()


def operation_name(kind: str, group: int) -> str:
    """A name for an operation that was given none.

    Args:
        kind: What it does, "allreduce".
        group: Number of the ranks that take part: what others leave out must not change their names.
    """
    if tf.executing_eagerly():
        thread = threading.current_thread()
        if in_py_function():
            return f"py_function/{kind}"
        if thread is threading.main_thread():
            return kind  # eager operations of a thread run one after the other
        return f"{_plain(thread.name)}/{kind}"
    graph = tf.compat.v1.get_default_graph()
    counts = _counts.setdefault(graph, {})
    count = counts[kind, group] = counts.get((kind, group), 0) + 1
    return f"{_plain(getattr(graph, 'name', 'graph'))}/{kind} {count}"


def _plain(title: str) -> str:
    """Without numbers of the process, which differ from rank to rank."""
    return re.sub(r"_?\d+", "", title)
