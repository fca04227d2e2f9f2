"""Names by which the ranks' operations find each other.

Ranks trace the same functions, but not equally often: a last batch of another size makes one rank trace
anew. So names count operations within a trace, never over the whole process; the k-th run of a name on one
rank meets the k-th on the others.
"""

from __future__ import annotations

import re
import weakref
from typing import Any

import tensorflow as tf

__all__ = ["operation_name"]

# Operations so far in each function that is being traced.
_counts: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


def operation_name(kind: str) -> str:
    """A name for an operation that was given none.

    Args:
        kind: What it does, "allreduce".
    """
    if tf.executing_eagerly():
        return kind  # eager operations of a thread run one after the other
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None and hasattr(graph.outer_graph, "outer_graph"):
        graph = graph.outer_graph  # bodies of loops and branches have numbers of the process in their names
    counts = _counts.setdefault(graph, {})
    counts[kind] = counts.get(kind, 0) + 1
    title = re.sub(r"_?\d+", "", getattr(graph, "name", "graph"))
    return f"{title}/{kind} {counts[kind]}"
