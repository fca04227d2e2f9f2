"""Collectives, eager and in graphs, with gradients where there are any to go through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from multiring.horovod.basics import process_set_of
from multiring.horovod.process_sets import ProcessSet, global_process_set
from multiring.horovod.reduce_ops import Average
from multiring.horovod.tensorflow.compression import Compression, Compressor
from multiring.horovod.tensorflow.differentiable import (
    Reduction,
    allgather_all,
    allreduce_all,
    allreduce_one,
    alltoall_one,
    as_is,
    broadcast_one,
    reducescatter_all,
)
from multiring.horovod.tensorflow.graph_calls import joined, number

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]

Tensor = Any

_joined, _number = as_is(joined), as_is(number)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Tensor:
    """Reduces a tensor over all ranks; the average by default. Differentiable.

    Args:
        tensor: A tensor of the same shape and dtype on all ranks, or `tf.IndexedSlices`, of which the rows of
            all ranks are gathered (Average and Sum only).
        average: Its former way to say Average or Sum.
        device_dense: Ignored, as `device_sparse`: tensors are reduced on the CPU.
        device_sparse: Ignored.
        compression: What the tensor is made of on its way.
        op: The reduction.
        prescale_factor: Factor for each input.
        postscale_factor: Factor for the result.
        name: What the ranks match it by; in a graph its place there by default.
        process_set: Ranks that take part.
        ignore_name_scope: Ignored: names are as they are given.

    Raises:
        tf.errors.FailedPreconditionError: The ranks ask for different things, or a rank is lost or late.
        NotImplementedError: Rows with factors, or by another reduction than Average and Sum.
    """
    scale = prescale_factor, postscale_factor
    how = Reduction(op, process_set, name, average, scale, compression)
    return allreduce_one(tensor, how)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
    ignore_name_scope: bool = False,
) -> list[Tensor]:
    """`allreduce` of several tensors, all of which fail together. Differentiable."""
    scale = prescale_factor, postscale_factor
    how = Reduction(op, process_set, name, average, scale, compression)
    reduced: list[Tensor] = allreduce_all(tensors, how)
    return reduced


def allgather(
    tensor: Tensor,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Joins the tensors of all ranks along dimension 0, in which they may differ. Differentiable."""
    return allgather_all([tensor], name, process_set, False)[0]


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`allgather` of several tensors. Differentiable."""
    gathered: list[Tensor] = allgather_all(tensors, name, process_set, True)
    return gathered


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """A new tensor with the values of rank `root_rank` of the job, on all ranks. Differentiable."""
    return broadcast_one(tensor, root_rank, name, process_set)


def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows of dimension 0 to each rank: as many as `splits` says, or equally many. Differentiable.

    Returns:
        What was received; with `splits` given, a pair of that and the rows from each rank (int32).

    Raises:
        tf.errors.InvalidArgumentError: The splits do not fit.
    """
    return alltoall_one(tensor, splits, name, process_set)


def reducescatter(
    tensor: Tensor,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduces a tensor over all ranks; each gets a share of dimension 0, the first ones one row more.
    Differentiable.

    Raises:
        tf.errors.FailedPreconditionError: As `allreduce`; the tensor has no dimensions, or `op` is Adasum.
    """
    how = Reduction(
        op=op,
        scale=(prescale_factor, postscale_factor),
        compression=compression,
        name=name,
        process_set=process_set,
    )
    return reducescatter_all([tensor], how, False)[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` of several tensors. Differentiable."""
    how = Reduction(
        op=op,
        scale=(prescale_factor, postscale_factor),
        compression=compression,
        name=name,
        process_set=process_set,
    )
    shares: list[Tensor] = reducescatter_all(tensors, how, True)
    return shares


def join() -> Tensor:
    """Contributes zeros to the allreduces of the other ranks until all have joined; averages go on dividing
    by the number of all ranks.

    Returns:
        The rank that was the last to join (int32).
    """
    return _joined()


def size_op(process_set_id: int = 0, name: str | None = None) -> Tensor:
    """The number of ranks, looked up when a graph runs; of process sets other than 0, when it is made."""
    return _number("size", process_set_of(process_set_id), name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Tensor:
    """1 where this process is in the process set, else 0."""
    return _number("included", process_set_of(process_set_id), name)


def rank_op(name: str | None = None) -> Tensor:
    """The rank of this process."""
    return _number("rank", global_process_set, name)


def local_size_op(name: str | None = None) -> Tensor:
    """The number of ranks on this host."""
    return _number("local_size", global_process_set, name)


def local_rank_op(name: str | None = None) -> Tensor:
    """The rank of this process among those of its host."""
    return _number("local_rank", global_process_set, name)
