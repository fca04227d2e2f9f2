"""Collectives, eager and in graphs, with gradients where there are any to go through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from multiring.horovod.basics import process_set_of
from multiring.horovod.host_calls import Asked
from multiring.horovod.process_sets import ProcessSet, global_process_set
from multiring.horovod.reduce_ops import Average, Sum, op_name, resolve_op
from multiring.horovod.submissions import reduction
from multiring.horovod.tensorflow.compression import Compression, Compressor
from multiring.horovod.tensorflow.graph_calls import begin, call, joined, name_in_graph, number

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "begin_allreduce",
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
Backward = Callable[..., list[Tensor]]

_as_is = tf.autograph.experimental.do_not_convert


def _with_gradient(
    asked: Asked, tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, backward: Backward
) -> list[Tensor]:
    """The results of a call; `backward` gets their gradients, and a name for operations of its own."""
    name = name_in_graph(asked.kind, name)

    @tf.custom_gradient
    def forward(*inputs: Tensor) -> Any:
        results = call(asked, inputs, name, process_set)

        def gradient(*gradients: Tensor) -> Any:
            suffixed = None if tf.executing_eagerly() else f"{name or asked.kind}.gradient"
            return backward(list(gradients), suffixed)

        return tuple(results), gradient

    inputs = [tf.convert_to_tensor(tensor) for tensor in tensors]
    found = forward(*inputs)
    return list(found) if isinstance(found, list | tuple) else [found]


def _allreduce(
    asked: Asked, tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet
) -> list[Tensor]:
    def backward(gradients: list[Tensor], name: str | None) -> list[Tensor]:
        return _allreduce(asked, gradients, name, process_set)

    return _with_gradient(asked, tensors, name, process_set, backward)


def _scale_of(prescale: float, postscale: float) -> tuple[float, float]:
    return float(prescale), float(postscale)


@_as_is
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
    op = resolve_op(op, average)
    scale = _scale_of(prescale_factor, postscale_factor)
    if isinstance(tensor, tf.IndexedSlices):
        return _allreduce_slices(tensor, op, scale, name, process_set)()
    return grouped_allreduce(
        [tensor], None, "", "", compression, op, *scale, process_set, name=name, _is_group=False
    )[0]


def _allreduce_slices(
    slices: Any, op: int, scale: tuple[float, float], name: str | None, process_set: ProcessSet
) -> Callable[[], Any]:
    if op not in (Average, Sum):
        raise NotImplementedError("The op parameter of a sparse allreduce has to be hvd.Average or hvd.Sum.")
    if scale != (1.0, 1.0):
        raise NotImplementedError(
            "prescale_factor and postscale_factor are not supported with tf.IndexedSlices"
        )
    name = name_in_graph("allreduce of slices", name)
    asked = Asked("allgather")
    values = begin(asked, [slices.values], name and f"{name}.values", process_set)
    indices = begin(asked, [slices.indices], name and f"{name}.indices", process_set)

    def wait() -> Any:
        rows = values()[0]
        if op == Average:
            rows = rows / tf.cast(process_set.operations().size, rows.dtype)
        return tf.IndexedSlices(rows, indices()[0], slices.dense_shape)

    return wait


def begin_allreduce(
    tensors: Sequence[Tensor],
    compression: type[Compressor],
    op: int,
    scale: tuple[float, float],
    name: str | None,
    process_set: ProcessSet,
) -> Callable[[], list[Tensor]]:
    """Submits an allreduce of one or several tensors, or of one `tf.IndexedSlices`, that no gradient goes
    through; gives a function that waits, and returns the results."""
    if isinstance(tensors[0], tf.IndexedSlices):
        wait = _allreduce_slices(tensors[0], op, scale, name, process_set)
        return lambda: [wait()]
    asked = Asked("allreduce", *reduction(op, None, scale, process_set), is_group=len(tensors) > 1)
    pairs = [compression.compress(tensor) for tensor in tensors]
    start = begin(asked, [each for each, _ in pairs], name, process_set)
    return lambda: [compression.decompress(each, ctx) for each, (_, ctx) in zip(start(), pairs, strict=True)]


@_as_is
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
    _is_group: bool = True,
) -> list[Tensor]:
    """`allreduce` of several tensors, all of which fail together. Differentiable."""
    if any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        raise NotImplementedError("IndexedSlices are not supported by grouped_allreduce; use allreduce")
    if len(tensors) == 0:
        return []
    pairs = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
    scale = _scale_of(prescale_factor, postscale_factor)
    asked = Asked("allreduce", *reduction(op, average, scale, process_set), is_group=_is_group)
    reduced = _allreduce(asked, [each for each, _ in pairs], name, process_set)
    return [compression.decompress(each, ctx) for each, (_, ctx) in zip(reduced, pairs, strict=True)]


@_as_is
def allgather(
    tensor: Tensor,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Joins the tensors of all ranks along dimension 0, in which they may differ. Differentiable."""
    return _allgather(Asked("allgather"), [tensor], name, process_set)[0]


@_as_is
def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`allgather` of several tensors. Differentiable."""
    if len(tensors) == 0:
        return []
    return _allgather(Asked("allgather", is_group=True), tensors, name, process_set)


def _allgather(
    asked: Asked, tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet
) -> list[Tensor]:
    inputs = [tf.convert_to_tensor(tensor) for tensor in tensors]

    def backward(gradients: list[Tensor], name: str | None) -> list[Tensor]:
        """This rank's rows of the averaged gradients."""
        operations = process_set.operations()
        own = tf.stack([tf.shape(each)[0] for each in inputs])
        rows = call(Asked("allgather"), [own[None]], name and f"{name}.rows", process_set)[0]
        first = tf.reduce_sum(rows[: operations.rank], 0)
        average = Asked("allreduce", "average", is_group=asked.is_group)
        reduced = _allreduce(average, gradients, name, process_set)
        return [each[first[k] : first[k] + own[k]] for k, each in enumerate(reduced)]

    return _with_gradient(asked, inputs, name, process_set, backward)


@_as_is
def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """A new tensor with the values of rank `root_rank` of the job, on all ranks. Differentiable."""
    is_root = process_set.operations().rank == process_set.root(root_rank)

    def backward(gradients: list[Tensor], name: str | None) -> list[Tensor]:
        reduced = _allreduce(Asked("allreduce", "average"), gradients, name, process_set)
        if is_root:
            return reduced
        with tf.control_dependencies(reduced):  # or a session would leave the allreduce out
            return [tf.identity(tf.zeros_like(reduced[0]))]

    return _with_gradient(Asked("broadcast", root=root_rank), [tensor], name, process_set, backward)[0]


@_as_is
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
    inputs = [tf.convert_to_tensor(tensor)]
    if splits is not None:
        inputs.append(tf.cast(splits, tf.int32))
    name = name_in_graph("alltoall", name)

    @tf.custom_gradient
    def exchange(source: Tensor) -> Any:
        received, counts = call(Asked("alltoall"), [source, *inputs[1:]], name, process_set)

        def backward(gradient: Tensor, _: Tensor) -> Tensor:
            suffixed = None if tf.executing_eagerly() else f"{name}.gradient"
            return alltoall(gradient, counts, suffixed, process_set=process_set)[0]

        return (received, counts), backward

    received, counts = exchange(inputs[0])
    return received if splits is None else (received, counts)


def _reducescatter(
    asked: Asked, tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet
) -> list[Tensor]:
    def backward(gradients: list[Tensor], name: str | None) -> list[Tensor]:
        factor = asked.prescale * asked.postscale
        if asked.op == op_name(Sum):
            factor *= process_set.operations().size
        gather = Asked("allgather", is_group=asked.is_group)
        gathered = _allgather(gather, gradients, name, process_set)
        return [each * tf.cast(factor, each.dtype) for each in gathered]

    return _with_gradient(asked, tensors, name, process_set, backward)


@_as_is
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
    scale = prescale_factor, postscale_factor
    return grouped_reducescatter(
        [tensor], device_dense, compression, op, name, process_set, *scale, _is_group=False
    )[0]


@_as_is
def grouped_reducescatter(
    tensors: Sequence[Tensor],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    _is_group: bool = True,
) -> list[Tensor]:
    """`reducescatter` of several tensors. Differentiable."""
    if any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        raise NotImplementedError("IndexedSlices are not supported by reducescatter")
    if len(tensors) == 0:
        return []
    pairs = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
    scale = _scale_of(prescale_factor, postscale_factor)
    asked = Asked("reducescatter", op_name(op), *scale, is_group=_is_group)
    shares = _reducescatter(asked, [each for each, _ in pairs], name, process_set)
    return [compression.decompress(each, ctx) for each, (_, ctx) in zip(shares, pairs, strict=True)]


@_as_is
def join() -> Tensor:
    """Contributes zeros to the allreduces of the other ranks until all have joined; averages go on dividing
    by the number of all ranks.

    Returns:
        The rank that was the last to join (int32).
    """
    return joined()


@_as_is
def size_op(process_set_id: int = 0, name: str | None = None) -> Tensor:
    """The number of ranks, looked up when a graph runs; of process sets other than 0, when it is made."""
    return number("size", process_set_of(process_set_id), name)


@_as_is
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Tensor:
    """1 where this process is in the process set, else 0."""
    return number("included", process_set_of(process_set_id), name)


@_as_is
def rank_op(name: str | None = None) -> Tensor:
    """The rank of this process."""
    return number("rank", global_process_set, name)


@_as_is
def local_size_op(name: str | None = None) -> Tensor:
    """The number of ranks on this host."""
    return number("local_size", global_process_set, name)


@_as_is
def local_rank_op(name: str | None = None) -> Tensor:
    """The rank of this process among those of its host."""
    return number("local_rank", global_process_set, name)
