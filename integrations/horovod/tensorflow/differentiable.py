"""What collectives do, eager and in graphs, with gradients where there are any to go through."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record  # there is no public way to ask whether a tape records

from multiring.horovod.host_calls import Asked
from multiring.horovod.process_sets import ProcessSet
from multiring.horovod.reduce_ops import Average, Sum, op_name, resolve_op
from multiring.horovod.request import Source
from multiring.horovod.submissions import check_differentiable, reduction
from multiring.horovod.tensorflow.compression import Compression, Compressor
from multiring.horovod.tensorflow.errors import raised_as_tensorflow
from multiring.horovod.tensorflow.graph_calls import begin, call, name_in_graph, number
from multiring.tensorflow.tensors import to_tensor

__all__ = [
    "Reduction",
    "allgather_all",
    "allreduce_all",
    "allreduce_one",
    "alltoall_one",
    "as_is",
    "begin_allreduce",
    "broadcast_one",
    "reducescatter_all",
]

Tensor = Any
Tensors = Sequence[Tensor]
Backward = Callable[..., list[Tensor]]


@dataclass(frozen=True)
class Reduction:
    """What a call that reduces is told beside its tensors.

    Attributes:
        op: The reduction.
        process_set: Ranks that take part.
        name: What the ranks match it by; None: in a graph its place there.
        average: Its former way to say Average or Sum.
        scale: Factors for each input and for the result.
        compression: What tensors are made of on their way.
        sources: Variables whose gradients the tensors are, if they are gradients of variables.
    """

    op: int | None
    process_set: ProcessSet
    name: str | None
    average: bool | None = None
    scale: tuple[float, float] = (1.0, 1.0)
    compression: type[Compressor] = Compression.none
    sources: tuple[Source, ...] = ()

    def allreduce(self, is_group: bool) -> Asked:
        """An allreduce of this kind."""
        asked = reduction(self.op, self.average, self.scale, self.process_set)
        return Asked("allreduce", *asked, is_group=is_group, sources=self.sources)

    def compressed(self, tensors: Tensors) -> tuple[list[Tensor], Callable[[Tensors], list[Tensor]]]:
        """What tensors are made of on their way, and how results of the same are made again of such."""
        pairs = [self.compression.compress(to_tensor(tensor)) for tensor in tensors]

        def restored(results: Tensors) -> list[Tensor]:
            return [
                self.compression.decompress(each, ctx) for each, (_, ctx) in zip(results, pairs, strict=True)
            ]

        return [each for each, _ in pairs], restored


def as_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which autograph leaves alone, and whose errors are TensorFlow's.

    Public functions are not wrapped: programs look at their defaults.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with raised_as_tensorflow():
            return function(*args, **kwargs)

    wrapped: Callable[..., Any] = tf.autograph.experimental.do_not_convert(wrapper)
    return wrapped


@as_is
def allreduce_one(tensor: Tensor, how: Reduction) -> Tensor:
    """See `allreduce`."""
    if isinstance(tensor, tf.IndexedSlices):
        return _allreduce_slices(tensor, how)()
    return _allreduce_compressed([tensor], how, False)[0]


@as_is
def allreduce_all(tensors: Tensors, how: Reduction) -> list[Tensor]:
    """See `grouped_allreduce`."""
    if any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        raise NotImplementedError("IndexedSlices are not supported by grouped_allreduce; use allreduce")
    return _allreduce_compressed(tensors, how, True) if len(tensors) else []


def _allreduce_compressed(tensors: Tensors, how: Reduction, is_group: bool) -> list[Tensor]:
    sent, restored = how.compressed(tensors)
    return restored(_allreduce(how.allreduce(is_group), sent, how.name, how.process_set))


@as_is
def allgather_all(
    tensors: Tensors, name: str | None, process_set: ProcessSet, is_group: bool
) -> list[Tensor]:
    """See `grouped_allgather`."""
    if len(tensors) == 0:
        return []
    return _allgather(Asked("allgather", is_group=is_group), tensors, name, process_set)


@as_is
def broadcast_one(tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
    """See `broadcast`."""
    process_set.root(root_rank)  # which raises where it is not in the set

    def backward(gradients: list[Tensor], name: str | None) -> list[Tensor]:
        reduced = _allreduce(Asked("allreduce", "average"), gradients, name, process_set)
        is_root = tf.equal(number("rank", process_set, None), root_rank)
        return [tf.where(is_root, reduced[0], tf.zeros_like(reduced[0]))]

    return _with_gradient(Asked("broadcast", root=root_rank), [tensor], name, process_set, backward)[0]


@as_is
def alltoall_one(tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
    """See `alltoall`."""
    inputs = [to_tensor(tensor)]
    if splits is not None:
        counts = tf.convert_to_tensor(splits)
        if not counts.dtype.is_integer:
            raise ValueError(f"alltoall: splits of {counts.dtype.name}; expected integers")
        inputs.append(tf.cast(counts, tf.int32))
    name = name_in_graph("alltoall", name, process_set)

    @tf.custom_gradient
    def exchange(source: Tensor) -> Any:
        received, counts = call(Asked("alltoall"), [source, *inputs[1:]], name, process_set)

        def backward(gradient: Tensor, _: Tensor) -> Tensor:
            suffixed = None if tf.executing_eagerly() else f"{name}.gradient"
            return alltoall_one(gradient, counts, suffixed, process_set)[0]

        return (received, counts), backward

    received, counts = exchange(inputs[0])
    return received if splits is None else (received, counts)


@as_is
def reducescatter_all(tensors: Tensors, how: Reduction, is_group: bool) -> list[Tensor]:
    """See `grouped_reducescatter`."""
    if any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        raise NotImplementedError("IndexedSlices are not supported by reducescatter")
    if len(tensors) == 0:
        return []
    sent, restored = how.compressed(tensors)
    prescale, postscale = map(float, how.scale)
    asked = Asked("reducescatter", op_name(how.op), prescale, postscale, is_group=is_group)
    return restored(_reducescatter(asked, sent, how.name, how.process_set))


def _with_gradient(
    asked: Asked, tensors: Tensors, name: str | None, process_set: ProcessSet, backward: Backward
) -> list[Tensor]:
    """The results of a call; `backward` gets their gradients, and a name for operations of its own."""
    name = name_in_graph(asked.kind, name, process_set)

    @tf.custom_gradient
    def forward(*inputs: Tensor) -> Any:
        results = call(asked, inputs, name, process_set)

        def gradient(*gradients: Tensor) -> Any:
            suffixed = None if tf.executing_eagerly() else f"{name or asked.kind}.gradient"
            return backward(list(gradients), suffixed)

        return tuple(results), gradient

    inputs = [to_tensor(tensor) for tensor in tensors]
    found = forward(*inputs)
    return list(found) if isinstance(found, list | tuple) else [found]


def _allreduce(asked: Asked, tensors: Tensors, name: str | None, process_set: ProcessSet) -> list[Tensor]:
    def backward(gradients: list[Tensor], name: str | None) -> list[Tensor]:
        check_differentiable(asked.op)
        return _allreduce(asked, gradients, name, process_set)

    return _with_gradient(asked, tensors, name, process_set, backward)


def _allreduce_slices(slices: Any, how: Reduction) -> Callable[[], Any]:
    op, process_set = resolve_op(how.op, how.average), how.process_set
    if op not in (Average, Sum):
        raise NotImplementedError("The op parameter of a sparse allreduce has to be hvd.Average or hvd.Sum.")
    if how.scale != (1.0, 1.0):
        raise NotImplementedError(
            "prescale_factor and postscale_factor are not supported with tf.IndexedSlices"
        )
    name = name_in_graph("allreduce of slices", how.name, process_set)
    # By the name that a dense tensor would have: a mismatch, and no wait, where another rank's is dense. Rows
    # and their numbers are one operation, of which no half stays in flight after that.
    asked, parts = Asked("sparse", sources=how.sources), [slices.values, slices.indices]
    if _is_recorded():
        gathered = _given(_gather_rows(asked, parts, name, process_set))
    else:
        gathered = begin(asked, parts, name, process_set)

    def wait() -> Any:
        rows, indices = gathered()
        if op == Average:
            rows = rows / tf.cast(number("size", process_set, None), rows.dtype)
        return tf.IndexedSlices(rows, indices, slices.dense_shape)

    return wait


def _given(found: list[Tensor]) -> Callable[[], list[Tensor]]:
    return lambda: found


def _is_recorded() -> bool:
    """Whether gradients may be asked for: in a graph, and where a tape records."""
    return not tf.executing_eagerly() or bool(record.could_possibly_record())


def _gather_rows(asked: Asked, parts: Tensors, name: str | None, process_set: ProcessSet) -> list[Tensor]:
    """Gather rows of all ranks, each with its number. Backward: the sum of all ranks' gradients of this
    rank's rows."""
    rows = tf.convert_to_tensor(parts[0])

    def backward(gradients: list[Tensor], name: str | None) -> list[Tensor]:
        first, own = _place_of_rows([rows], name, process_set)
        summed = _allreduce(Asked("allreduce", "sum"), gradients[:1], name, process_set)[0]
        return [summed[first[0] : first[0] + own[0]], None]

    return _with_gradient(asked, [rows, parts[1]], name, process_set, backward)


def _place_of_rows(inputs: Tensors, name: str | None, process_set: ProcessSet) -> tuple[Tensor, Tensor]:
    """Return where the rows of this rank begin in what an allgather of each input gives, and their number.
    Collective."""
    own = tf.stack([tf.shape(each)[0] for each in inputs])
    rows = call(Asked("allgather"), [own[None]], name and f"{name}.rows", process_set)[0]
    return tf.reduce_sum(rows[: number("rank_in_set", process_set, None)], 0), own


def begin_allreduce(tensors: Tensors, how: Reduction) -> Callable[[], list[Tensor]]:
    """Submit an allreduce of one or several tensors, or of one `tf.IndexedSlices`; return a function that
    waits, and returns the results. Differentiable in a graph and where a tape records."""
    if isinstance(tensors[0], tf.IndexedSlices):
        wait = _allreduce_slices(tensors[0], how)
        return lambda: [wait()]
    asked = how.allreduce(is_group=len(tensors) > 1)
    sent, restored = how.compressed(tensors)
    if _is_recorded():
        results = restored(_allreduce(asked, sent, how.name, how.process_set))
        return lambda: results
    start = begin(asked, sent, how.name, how.process_set)
    return lambda: restored(start())


def _allgather(asked: Asked, tensors: Tensors, name: str | None, process_set: ProcessSet) -> list[Tensor]:
    inputs = [to_tensor(tensor) for tensor in tensors]

    def backward(gradients: list[Tensor], name: str | None) -> list[Tensor]:
        """This rank's rows of the averaged gradients."""
        first, own = _place_of_rows(inputs, name, process_set)
        average = Asked("allreduce", "average", is_group=asked.is_group)
        reduced = _allreduce(average, gradients, name, process_set)
        return [each[first[k] : first[k] + own[k]] for k, each in enumerate(reduced)]

    return _with_gradient(asked, inputs, name, process_set, backward)


def _reducescatter(asked: Asked, tensors: Tensors, name: str | None, process_set: ProcessSet) -> list[Tensor]:
    def backward(gradients: list[Tensor], name: str | None) -> list[Tensor]:
        factor = tf.constant(asked.prescale * asked.postscale, tf.float64)
        if asked.op == op_name(Sum):
            factor *= tf.cast(number("size", process_set, None), tf.float64)
        gather = Asked("allgather", is_group=asked.is_group)
        gathered = _allgather(gather, gradients, name, process_set)
        return [each * tf.cast(factor, each.dtype) for each in gathered]

    return _with_gradient(asked, tensors, name, process_set, backward)
