"""Normalisation with given statistics, whose dependence on the input the backward pass accounts for."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import chainer
from multiring import Communicator
from multiring.chainer.arrays import Array, on_device, to_device, to_host

__all__ = ["Normalise", "Statistics", "local_moments"]


class Statistics(NamedTuple):
    """Of the batches of all ranks: values per channel, mean and biased variance (float64)."""

    samples: float
    mean: Array
    variance: Array


def local_moments(x: Any) -> tuple[int, Array, Array]:
    """Values per channel, mean and biased variance of `x` of shape (batch, channels, ...); float64."""
    channels = x.shape[1]
    count = x.size // channels if channels else 0
    if not count:
        return 0, np.zeros(channels), np.zeros(channels)
    x = x.astype(_working_dtype(x), copy=False)
    mean = _channel_sums(x) / count
    deviation = x - _per_channel(mean, x)
    deviation *= deviation
    # The mean was rounded to the dtype of x, or not; the second sum does not mind.
    return count, to_host(mean), to_host(_channel_sums(deviation)) / count


class Normalise(chainer.Function):
    """y = (x - mean) / sqrt(variance + eps) * gamma + beta, over the ranks of a communicator.

    An old-style function, as all of ChainerMN's that communicate are: Chainer itself refuses to
    differentiate it twice.
    """

    def __init__(self, statistics: Statistics, eps: float, comm: Communicator, label: str) -> None:
        self._statistics, self._eps, self._comm, self._name = statistics, eps, comm, label

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """y, in the shape and dtype of x."""
        x, gamma, beta = inputs
        statistics = self._statistics
        device = on_device(x)
        self._mean = to_device(statistics.mean, device)
        self._scale = to_device(1.0 / np.sqrt(statistics.variance + self._eps), device)
        y = x.astype(_working_dtype(x), copy=False) - _per_channel(self._mean, x)
        y *= _per_channel(self._scale * gamma, x)
        y += _per_channel(beta, x)
        return (y.astype(x.dtype, copy=False),)

    def backward(self, inputs: tuple[Any, ...], gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        """Gradients of x, gamma and beta. Collective."""
        x, gamma, beta = inputs
        gradient = gradients[0].astype(_working_dtype(x), copy=False)
        deviation = x.astype(_working_dtype(x), copy=False) - _per_channel(self._mean, x)
        # Sums over this rank's batch: of the gradient, and of the gradient times the normalised input.
        plain = _channel_sums(gradient)
        product = gradient * deviation
        weighted = _channel_sums(product) * self._scale
        sums = chainer.backend.get_array_module(x).stack([plain, weighted])
        self._comm.allreduce(sums, op="sum", out=sums, name=f"{self._name} backward", comm_dtype="float32")
        means = sums / max(self._statistics.samples, 1.0)
        factor = self._scale * gamma
        # factor * (gradient - mean of gradients - normalised * mean of (gradient * normalised))
        deviation *= _per_channel(-factor * self._scale * means[1], x)
        np.multiply(gradient, _per_channel(factor, x), out=product)
        deviation += product
        deviation -= _per_channel(factor * means[0], x)
        return (
            deviation.astype(x.dtype, copy=False),
            weighted.astype(gamma.dtype),
            plain.astype(beta.dtype),
        )


def _working_dtype(x: Any) -> type[np.floating[Any]]:
    return np.float64 if x.dtype == np.float64 else np.float32


def _per_channel(values: Any, like: Any) -> Any:
    shaped = values.reshape(1, -1, *([1] * (like.ndim - 2)))
    return shaped.astype(_working_dtype(like), copy=False)


def _channel_sums(x: Any) -> Any:
    """Sums per channel: first within each image, then over images in float64, which keeps the digits."""
    within = x.sum(axis=tuple(range(2, x.ndim))) if x.ndim > 2 else x
    return within.sum(axis=0, dtype=np.float64)
