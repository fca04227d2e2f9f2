"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf
from multiring.derived import resolve
from multiring.errors import UsageError
from multiring.state.batch_moments import fold_rows
from multiring.tensorflow.graph.library import number_of
from multiring.tensorflow.graph.naming import operation_name
from multiring.tensorflow.ops import allgather, allreduce

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["sync_batch_norm"]

Tensor = Any


@tf.autograph.experimental.do_not_convert
def sync_batch_norm(
    x: Tensor,
    scale: Tensor,
    offset: Tensor,
    *,
    epsilon: float = 1e-5,
    name: str | None = None,
    comm: Communicator | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalises with mean and variance of the batches of all ranks together. Collective; differentiable.

    Statistics travel as count, mean and sum of squared deviations of each rank in float64 and are combined
    in a balanced tree over the ranks (Chan, Golub, LeVeque 1979), which loses no digits where the mean is
    large. Forward and backward take one collective each.

    Args:
        x: Floating-point tensor of shape (batch, ..., channels); batches may differ in size, and be empty.
        scale: Factor per channel, shape (channels,).
        offset: Offset per channel, shape (channels,).
        epsilon: Added to the variance.
        name: Name by which the ranks' operations find each other; without it that of the place in the
            function.
        comm: Ranks whose batches are normalised together; the world by default.

    Returns:
        The normalised tensor, of shape and dtype of `x`; mean and biased variance per channel and the number
        of values per channel, float64, the same bits on every rank, through which no gradient flows.

    Raises:
        UsageError: `x` has less than two dimensions or is not floating-point.
    """
    x = tf.convert_to_tensor(x)
    if not x.dtype.is_floating or x.shape.rank is None or x.shape.rank < 2:
        raise UsageError(
            f"batch normalisation needs floating-point (batch, ..., channels), not {x.dtype.name} {x.shape}"
        )
    comm = resolve(comm)
    name = operation_name("batch normalisation", number_of(comm)) if name is None else name
    axes = list(range(x.shape.rank - 1))
    work = tf.float64 if x.dtype == tf.float64 else tf.float32
    count, mean, variance = _statistics(tf.cast(tf.stop_gradient(x), work), axes, comm, name)

    @tf.custom_gradient
    def normalise(x: Tensor, scale: Tensor, offset: Tensor) -> Any:
        inverse = tf.math.rsqrt(variance + epsilon)
        centred = tf.cast(x, work) - tf.cast(mean, work)
        y = centred * tf.cast(inverse * tf.cast(scale, tf.float64), work) + tf.cast(offset, work)

        def backward(gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            gradient = tf.cast(gradient, work)
            # Sums over this rank's batch: of the gradient, and of the gradient times the normalised input.
            plain = tf.cast(tf.reduce_sum(gradient, axes), tf.float64)
            along = tf.cast(tf.reduce_sum(gradient * centred, axes), tf.float64) * inverse
            sums = tf.stack([plain, along])
            if comm.size > 1:
                sums = allreduce(sums, "sum", name=f"{name} backward", comm=comm)
            means = sums / tf.maximum(count, 1.0)
            factor = inverse * tf.cast(scale, tf.float64)
            # factor * (gradient - mean of gradients - normalised * mean of (gradient * normalised))
            dx = (
                gradient * tf.cast(factor, work)
                - centred * tf.cast(factor * inverse * means[1], work)
                - tf.cast(factor * means[0], work)
            )
            return tf.cast(dx, x.dtype), tf.cast(along, scale.dtype), tf.cast(plain, offset.dtype)

        return tf.cast(y, x.dtype), backward

    return normalise(x, scale, offset), mean, variance, count


def _statistics(x: Tensor, axes: list[int], comm: Communicator, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and biased variance over all ranks, float64."""
    own = tf.reduce_prod(tf.shape(x, tf.int64)[:-1])
    share = tf.cast(tf.maximum(own, 1), x.dtype)
    mean = tf.reduce_sum(x, axes) / share
    squares = tf.reduce_sum(tf.math.squared_difference(x, mean), axes)
    count = tf.cast(own, tf.float64)
    row = tf.concat([count[None], tf.cast(mean, tf.float64), tf.cast(squares, tf.float64)], 0)
    if comm.size > 1:
        rows = allgather(row[None], name=f"{name} forward", comm=comm)
        row = fold_rows(tf.unstack(tf.ensure_shape(rows, (comm.size, None))), _merged)
    channels = (tf.size(row) - 1) // 2
    total = row[0]
    return total, row[1 : channels + 1], row[channels + 1 :] / tf.maximum(total, 1.0)


def _merged(left: Tensor, right: Tensor) -> Tensor:
    """One row of (count, means, sums of squared deviations) of two."""
    channels = (tf.size(left) - 1) // 2
    count = left[0] + right[0]
    some = tf.maximum(count, 1.0)
    difference = right[1 : channels + 1] - left[1 : channels + 1]
    mean = left[1 : channels + 1] + difference * (right[0] / some)
    squares = left[channels + 1 :] + right[channels + 1 :] + difference**2 * (left[0] * right[0] / some)
    # An empty side counts for nothing, exactly.
    merged = tf.concat([count[None], mean, squares], 0)
    return tf.where(left[0] == 0, right, tf.where(right[0] == 0, left, merged))
