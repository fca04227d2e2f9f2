"""Gradients of the ops. Registered when this module is imported."""

from __future__ import annotations

import struct
from typing import Any

import tensorflow as tf
from multiring._core import ReduceOp
from multiring.errors import UsageError
from multiring.tensorflow.graph.library import rank_and_size
from multiring.tensorflow.graph.order import run

__all__: list[str] = []

Tensor = Any
_SUM, _AVERAGE = ReduceOp.SUM.value, ReduceOp.AVERAGE.value


def _attributes(op: Any, suffix: str = "gradient") -> dict[str, Any]:
    name = op.get_attr("tensor_name").decode()
    return {
        "tensor_name": f"{name} {suffix}",
        "communicator": op.get_attr("communicator"),
        "priority": op.get_attr("priority"),
    }


def _linear(op: Any) -> dict[str, Any]:
    """Attributes of a reduction, which has to be linear."""
    number = op.get_attr("reduce_op")
    if number not in (_SUM, _AVERAGE):
        raise UsageError(
            f"'{op.get_attr('tensor_name').decode()}' has no gradient: only 'sum' and 'average' can be "
            f"differentiated"
        )
    names = ("reduce_op", "prescale_bits", "postscale_bits")
    return {name: op.get_attr(name) for name in names} | _attributes(op)


@tf.RegisterGradient("MultiringAllreduce")
def _allreduce_gradient(op: Any, *gradients: Tensor) -> list[Tensor]:
    # The gradient of integers is None, on every rank alike.
    indices = [index for index, gradient in enumerate(gradients) if gradient is not None]
    found: list[Tensor] = [None] * len(op.inputs)
    if indices:
        tensors = [gradients[index] for index in indices]
        reduced = run("multiring_allreduce", tensors, [], labels=[], **_linear(op))
        for index, value in zip(indices, reduced, strict=True):
            found[index] = value
    return found


@tf.RegisterGradient("MultiringBroadcast")
def _broadcast_gradient(op: Any, *gradients: Tensor) -> list[Tensor]:
    indices = [index for index, gradient in enumerate(gradients) if gradient is not None]
    found: list[Tensor] = [None] * len(gradients)
    if indices:
        summed = _summed(op, [gradients[index] for index in indices])
        at_root = _rank_and_size(op)[0] == op.get_attr("root")
        for index, value in zip(indices, summed, strict=True):
            if at_root:
                found[index] = value
                continue
            # Without the dependency, a session folds the zeros of a known shape into a constant and skips the
            # allreduce, for which the root waits.
            with tf.control_dependencies([value]):
                found[index] = tf.zeros_like(value)
    return found


@tf.RegisterGradient("MultiringAllgather")
def _allgather_gradient(op: Any, gradient: Tensor, _: Tensor) -> list[Tensor]:
    rank = _rank_and_size(op)[0]
    rows = op.outputs[1]
    first = tf.reduce_sum(rows[:rank])
    own = _summed(op, [gradient])[0][first : first + rows[rank]]
    return [tf.reshape(own, tf.shape(op.inputs[0])), *[None] * (len(op.inputs) - 1)]


@tf.RegisterGradient("MultiringReduceScatter")
def _reduce_scatter_gradient(op: Any, gradient: Tensor) -> Tensor:
    attributes = _linear(op)
    scale = _double(attributes["prescale_bits"]) * _double(attributes["postscale_bits"])
    joined = run("multiring_allgather", gradient, [], **_attributes(op)).joined
    if attributes["reduce_op"] == _AVERAGE:
        scale /= _rank_and_size(op)[1]
    return joined if scale == 1.0 else joined * tf.cast(scale, joined.dtype)


@tf.RegisterGradient("MultiringAlltoall")
def _alltoall_gradient(op: Any, gradient: Tensor, _: Tensor) -> list[Tensor]:
    return [run("multiring_alltoall", gradient, op.outputs[1], **_attributes(op)).joined, None]


def _summed(op: Any, tensors: list[Tensor]) -> list[Tensor]:
    one = struct.unpack("<q", struct.pack("<d", 1.0))[0]
    options = {"reduce_op": _SUM, "prescale_bits": one, "postscale_bits": one, "labels": []}
    return list(run("multiring_allreduce", tensors, [], **options, **_attributes(op)))


def _rank_and_size(op: Any) -> tuple[int, int]:
    return rank_and_size(op.get_attr("communicator"))


def _double(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
