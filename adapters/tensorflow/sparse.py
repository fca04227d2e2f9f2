"""Sparse gradients (`tf.IndexedSlices`): only rows that some rank has touched travel.

The row numbers of all ranks are gathered; every rank puts its values at the places of its rows among all of
them, with zeros elsewhere, and these are reduced. So the sum has the same bits as that of dense gradients,
which adding up a concatenation of all values would not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from multiring.derived import resolve
from multiring.errors import UsageError
from multiring.tensorflow.graph.library import number_of
from multiring.tensorflow.graph.naming import operation_name
from multiring.tensorflow.ops import allgather, allreduce
from multiring.types import ReduceOpName

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["allreduce_slices", "as_dense"]


def as_dense(gradients: Sequence[Any]) -> list[Any]:
    """The gradients, `tf.IndexedSlices` among them as tensors."""
    return [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]


def allreduce_slices(
    slices: Any,
    op: ReduceOpName = "sum",
    *,
    name: str | None = None,
    comm: Communicator | None = None,
    scale: float = 1.0,
    step: Any = None,
) -> Any:
    """Reduces `tf.IndexedSlices` over ranks.

    Args:
        slices: Rows of this rank, in any order and with repetitions, or none at all.
        op: "sum" or "average".
        name: Name by which the ranks' operations find each other.
        comm: Ranks that take part; the world by default.
        scale: Factor for the result.
        step: As in `allreduce`.

    Returns:
        `tf.IndexedSlices` of the rows that any rank has, ascending and unique; the same bits on every rank.

    Raises:
        UsageError: Another `op`.
    """
    if op not in ("sum", "average"):
        raise UsageError(f"op is {op!r}; sparse tensors can be reduced by 'sum' and 'average'")
    comm = resolve(comm)
    if comm.size == 1 and scale == 1.0:
        return slices
    name = operation_name("allreduce of slices", number_of(comm)) if name is None else name
    indices = tf.cast(slices.indices, tf.int64)
    rows, positions = tf.unique(indices, out_idx=tf.int64)
    values = tf.math.unsorted_segment_sum(slices.values, positions, tf.size(rows))
    union = tf.sort(tf.unique(allgather(rows, name=f"{name} rows", comm=comm, step=step)).y)
    spread = tf.scatter_nd(
        tf.searchsorted(union, rows)[:, None],
        values,
        tf.concat([tf.shape(union), tf.shape(values)[1:]], 0),
    )
    reduced = allreduce(spread, op, name=f"{name} values", comm=comm, postscale=scale, step=step)
    return tf.IndexedSlices(reduced, tf.cast(union, slices.indices.dtype), slices.dense_shape)
