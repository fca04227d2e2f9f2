"""Collectives as TensorFlow ops: eager, inside `tf.function`, differentiable, any number in flight.

Operations are matched by name, so ranks may run them in any order. Those without a name get one from their
place in the function that is traced, or, in eager mode, simply the name of their kind.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

import tensorflow as tf
from multiring.derived import resolve
from multiring.reductions import ScaleKeywords, explain_arguments, reduce_op
from multiring.tensorflow.graph import op_gradients  # noqa: F401  # registers them
from multiring.tensorflow.graph.library import number_of
from multiring.tensorflow.graph.naming import operation_name
from multiring.tensorflow.graph.order import run
from multiring.tensorflow.tensors import to_tensor
from multiring.types import ReduceOpName

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "grouped_allreduce",
    "grouped_broadcast",
    "next_step",
    "reducescatter",
]

Tensor = Any
# Nothing here branches on the values of tensors, so AutoGraph, which would take long, has nothing to do.
_as_is = tf.autograph.experimental.do_not_convert


@_as_is
@explain_arguments
def allreduce(
    tensor: Tensor,
    op: ReduceOpName = "sum",
    *,
    name: str | None = None,
    comm: Communicator | None = None,
    step: Tensor | None = None,
    **scale: Unpack[ScaleKeywords],
) -> Tensor:
    """Reduces a tensor element by element over all ranks; every rank gets the result.

    Args:
        tensor: Tensor of any shape, the same shape and dtype on all ranks; or `tf.IndexedSlices`, of which
            ranks may have different rows ("sum" and "average" only).
        op: "sum", "average", "min", "max", "product", or of integers and bool "bitwise_and", "bitwise_or" or
            "bitwise_xor".
        name: Name by which the ranks' operations find each other.
        comm: Ranks that take part; the world by default.
        step: A number (int64) that has to be the same on all ranks; see `next_step`.
        scale: `prescale`, a factor for each input before the reduction, and `postscale`, one for the result.

    Returns:
        The result, with the shape of the input. Differentiable for "sum" and "average": its gradient is
        reduced in the same way.

    Raises:
        tf.errors.OpError: The communication failed; see `multiring.tensorflow.translate_errors`.
    """
    if isinstance(tensor, tf.IndexedSlices):
        from multiring.tensorflow.sparse import allreduce_slices

        factor = scale.get("prescale", 1.0) * scale.get("postscale", 1.0)
        return allreduce_slices(tensor, op, name=name, comm=comm, scale=factor, step=step)
    return grouped_allreduce([tensor], op, name=name, comm=comm, step=step, **scale)[0]


@_as_is
@explain_arguments
def grouped_allreduce(
    tensors: Sequence[Tensor],
    op: ReduceOpName = "sum",
    *,
    name: str | None = None,
    comm: Communicator | None = None,
    labels: Sequence[str] = (),
    priority: int = 0,
    step: Tensor | None = None,
    **scale: Unpack[ScaleKeywords],
) -> list[Tensor]:
    """Reduces several tensors, of any dtypes, as one operation; see `allreduce`.

    Where TensorFlow has no other use for an input, its memory takes the result.

    Args:
        labels: What error messages call the tensors; the same on all ranks.
        priority: Of the operations that all ranks have submitted, those of higher priority run first.
        step: As in `allreduce`.
        scale: As in `allreduce`.
    """
    reduction = _reduction(op, **scale)
    if len(tensors) == 0:
        return []
    results = run(
        "multiring_allreduce",
        [to_tensor(tensor) for tensor in tensors],
        [] if step is None else [step],
        **reduction,
        labels=list(labels),
        **_common("allreduce", name, comm, priority),
    )
    return list(results)


@_as_is
@explain_arguments
def broadcast(
    tensor: Tensor, root: int = 0, *, name: str | None = None, comm: Communicator | None = None
) -> Tensor:
    """Gives every rank the tensor of rank `root`; shapes and dtypes have to be the same on all ranks.

    Differentiable: the gradient is the sum over ranks on the root, and zero elsewhere.
    """
    return grouped_broadcast([tensor], root, name=name, comm=comm)[0]


@_as_is
def grouped_broadcast(
    tensors: Sequence[Tensor], root: int = 0, *, name: str | None = None, comm: Communicator | None = None
) -> list[Tensor]:
    """Broadcasts several tensors, of any dtypes, as one operation; see `broadcast`."""
    if len(tensors) == 0:
        return []
    results = run(
        "multiring_broadcast",
        [to_tensor(tensor) for tensor in tensors],
        root=root,
        **_common("broadcast", name, comm),
    )
    return list(results)


@_as_is
def allgather(
    tensor: Tensor,
    *,
    name: str | None = None,
    comm: Communicator | None = None,
    step: Tensor | None = None,
) -> Tensor:
    """Joins the tensors of all ranks along the first dimension, in the order of the ranks.

    Args:
        tensor: Ranks may have different first extents (0 too); the others and the dtype have to be the same.
            A scalar counts as one row.
        name: Name by which the ranks' operations find each other.
        comm: Ranks that take part; the world by default.
        step: As in `allreduce`.

    Returns:
        The joined tensor. Differentiable: a rank's gradient is the sum over ranks of what belongs to its
        rows.
    """
    return run(
        "multiring_allgather",
        to_tensor(tensor),
        [] if step is None else [step],
        **_common("allgather", name, comm),
    ).joined


@_as_is
@explain_arguments
def reducescatter(
    tensor: Tensor,
    op: ReduceOpName = "sum",
    *,
    name: str | None = None,
    comm: Communicator | None = None,
    **scale: Unpack[ScaleKeywords],
) -> Tensor:
    """Reduces a tensor over all ranks; rank i gets block i of the result, as `numpy.array_split` splits it.

    Arguments and errors are those of `allreduce`. Differentiable for "sum" and "average".
    """
    return run(
        "multiring_reduce_scatter",
        to_tensor(tensor),
        **_reduction(op, **scale),
        **_common("reducescatter", name, comm),
    )


@_as_is
def alltoall(
    tensor: Tensor,
    splits: Tensor | None = None,
    *,
    name: str | None = None,
    comm: Communicator | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Sends block i of a tensor to rank i; every rank joins what it receives along the first dimension.

    Args:
        tensor: At least one-dimensional; all extents but the first and the dtype are the same on all ranks.
        splits: Rows for each rank, adding up to the first extent, shape (ranks,); None splits evenly.
        name: Name by which the ranks' operations find each other.
        comm: Ranks that take part; the world by default.

    Returns:
        The received rows; with `splits` given, also the number of rows from each rank (int64).
        Differentiable.
    """
    rows = tf.zeros([0], tf.int64) if splits is None else tf.cast(splits, tf.int64)
    result = run("multiring_alltoall", to_tensor(tensor), rows, **_common("alltoall", name, comm))
    return result.joined if splits is None else (result.joined, result.rows)


@_as_is
def next_step(name: str, *, comm: Communicator | None = None, after: Sequence[Tensor] = ()) -> Tensor:
    """Counts the steps of this rank, one at each run; a scalar (int64).

    For the operations of a step: if a step fails on some ranks only and leaves operations out there, those of
    the next one would meet the peers' of this one. With the number of the step they are a mismatch.

    Args:
        name: What is counted; its operations belong together.
        comm: Ranks that the operations are for; the world by default.
        after: Tensors that have to be there first: a function that fails before has not begun the step.
    """
    with tf.control_dependencies(list(after)):
        return run("multiring_step", **_common("step", name, comm))


def _reduction(op: str, prescale: float = 1.0, postscale: float = 1.0) -> dict[str, int]:
    """Attributes that all reductions have."""
    return {
        "reduce_op": reduce_op(op).value,
        "prescale_bits": _bits(prescale),
        "postscale_bits": _bits(postscale),
    }


def _common(kind: str, name: str | None, comm: Communicator | None, priority: int = 0) -> dict[str, Any]:
    """Attributes that all ops have."""
    number = number_of(resolve(comm))
    return {
        "tensor_name": operation_name(kind, number) if name is None else name,
        "communicator": number,
        "priority": priority,
    }


def _bits(value: float) -> int:
    """A double as an integer of the same bits; TensorFlow's own floating attributes have 32."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])
