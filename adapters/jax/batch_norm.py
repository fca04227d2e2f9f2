"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from multiring.errors import UsageError
from multiring.jax.arguments import resolve
from multiring.jax.collectives import allgather
from multiring.state.batch_moments import fold_rows

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["BatchStatistics", "batch_statistics", "sync_batch_norm"]


class BatchStatistics(NamedTuple):
    """Of the batches of all ranks, per channel.

    Attributes:
        mean: Shape (channels,).
        variance: Biased, shape (channels,).
        samples: Values per channel, shape ().
    """

    mean: jax.Array
    variance: jax.Array
    samples: jax.Array

    @property
    def unbiased_variance(self) -> jax.Array:
        """What running statistics take up; 0 where there is one value."""
        return self.variance * (self.samples / jnp.maximum(self.samples - 1, 1))


def batch_statistics(
    x: Any,
    *,
    axis: int = -1,
    mask: Any | None = None,
    comm: Communicator | None = None,
    name: str | None = None,
) -> BatchStatistics:
    """Mean and variance over the batches of all ranks; differentiable, the same bits on every rank.

    Batches may differ in size, and be empty. One all-gather in the forward pass and one reduce-scatter in
    the backward pass, of count, mean and squared deviations of each rank; they are combined in a balanced
    tree over the ranks (Chan, Golub, LeVeque 1979), which loses no digits where the mean is large.

    Args:
        x: Floating-point array; all axes but `axis` are averaged over.
        axis: The axis of the channels.
        mask: Booleans of shape (batch,): samples that count. A batch that is filled up to a fixed size needs
            no compilation of its own.
        comm: Ranks whose batches belong together; the world by default.
        name: See `allreduce`.

    Returns:
        Statistics in float32, or float64 for float64 arrays.
    """
    comm = resolve(comm)
    x = jnp.asarray(x)
    if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise UsageError(
            f"rank {comm.rank}: {name or 'batch statistics'}: expected floating-point values of shape "
            f"(batch, ..., channels), not {x.dtype.name} {x.shape}"
        )
    axis %= x.ndim
    axes = tuple(other for other in range(x.ndim) if other != axis)
    values = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    channels = x.shape[axis]
    count: Any = math.prod(x.shape[other] for other in axes)
    if mask is not None:
        count = jnp.sum(mask) * (count // max(x.shape[0], 1))
    # An empty batch gives zeros that depend on it all the same: without a derivative this rank would take no
    # part in the backward pass of the others.
    mean = _masked(values, mask).sum(axes) / jnp.maximum(count, 1)
    squares = _masked(jnp.square(values - jnp.expand_dims(mean, axes)), mask).sum(axes)
    row = jnp.concatenate([jnp.full((1,), count, values.dtype), mean, squares])
    rows = row[None] if comm.size == 1 else allgather(row[None], comm=comm, name=name)
    total = fold_rows(rows, _merged)
    # A count is exact in float32 up to 2 ** 24; a mean over more values does not notice the rounding.
    samples = jax.lax.stop_gradient(total[0])
    return BatchStatistics(total[1 : channels + 1], total[channels + 1 :] / jnp.maximum(samples, 1), samples)


def _masked(values: jax.Array, mask: Any | None) -> jax.Array:
    if mask is None:
        return values
    return jnp.where(jnp.reshape(mask, (-1, *[1] * (values.ndim - 1))), values, 0)


def _merged(left: jax.Array, right: jax.Array) -> jax.Array:
    """One row of (count, means, sums of squared deviations) of two."""
    channels = (len(left) - 1) // 2
    n_left, n_right = (jax.lax.stop_gradient(part[0]) for part in (left, right))
    count = n_left + n_right
    share = n_right / jnp.maximum(count, 1)
    difference = right[1 : channels + 1] - left[1 : channels + 1]
    mean = left[1 : channels + 1] + difference * share
    squares = left[channels + 1 :] + right[channels + 1 :] + jnp.square(difference) * (n_left * share)
    return jnp.concatenate([count[None], mean, squares])


def sync_batch_norm(
    x: Any,
    scale: Any | None = None,
    offset: Any | None = None,
    *,
    eps: float = 1e-5,
    axis: int = -1,
    mask: Any | None = None,
    comm: Communicator | None = None,
    name: str | None = None,
) -> tuple[jax.Array, BatchStatistics]:
    """Normalise with the statistics of the batches of all ranks; see `batch_statistics`.

    Args:
        x: Array of shape (batch, ..., channels), or with the channels on another `axis`.
        scale: Factor per channel, shape (channels,).
        offset: Added per channel.
        eps: Added to the variance.

    The other arguments are those of `batch_statistics`.

    Returns:
        The normalised array, of shape and dtype of `x`, and the statistics for running averages.
    """
    x = jnp.asarray(x)
    found = batch_statistics(x, axis=axis, mask=mask, comm=comm, name=name)
    axis %= x.ndim
    others = tuple(other for other in range(x.ndim) if other != axis)
    factor = jax.lax.rsqrt(found.variance + eps)
    if scale is not None:
        factor = factor * scale
    normal = (x - jnp.expand_dims(found.mean, others)) * jnp.expand_dims(factor, others)
    if offset is not None:
        normal = normal + jnp.expand_dims(jnp.asarray(offset), others)
    return normal.astype(x.dtype), found
