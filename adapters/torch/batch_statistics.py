"""Mean and variance over the batches of all ranks, and the normalisation that uses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import torch
from multiring.errors import UsageError
from multiring.state.batch_moments import combine_moments, moments_row

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["Normalise", "Statistics", "global_statistics", "of_channels"]

Array = NDArray[np.float64]
Tensor = torch.Tensor

# An image with at least so many values in a channel has its moments computed by itself.
_IMAGE = 64


class Statistics(NamedTuple):
    """The number of samples per channel in the batches of all ranks, their mean and biased variance.

    Mean and variance are NumPy arrays of shape (channels,), float64: on so few values an operation of NumPy
    takes a fifth of the time of one of Torch.
    """

    samples: float
    mean: Array
    variance: Array


def global_statistics(x: Tensor, comm: Communicator, label: str) -> Statistics:
    """Return the statistics of the batches of all ranks, the same bits on each. Collective."""
    channels = x.shape[1]
    count = x.numel() // channels if channels else 0
    row = moments_row(count, *_moments(x, count))
    return Statistics(*combine_moments(comm.allgather(row, name=f"{label} forward")))


def _moments(x: Tensor, count: int) -> tuple[Array, Array]:
    """Return mean and biased variance of each channel of a batch with `count` values for each; float64.

    Where channels are not the last dimension in memory of a CPU, Torch's own kernels are used: the one of
    group normalisation, which is vectorised, for images, else the one that adds up in double precision, and
    takes six times as long. Elsewhere there are two passes, of which the second corrects the mean of the
    first (Chan, Golub, LeVeque 1983): a tenth of the time of `torch.var_mean` over these axes.
    """
    if count == 0:
        return np.zeros(x.shape[1]), np.zeros(x.shape[1])
    x = x.to(_working_dtype(x))
    if _has_kernels(x):
        if count >= _IMAGE * len(x):
            return _moments_of_images(x)
        found = torch.batch_norm_update_stats(x, None, None, 0.0)
    else:
        axes = _all_but_channels(x)
        rounded = x.sum(axes) / count
        deviation = x - _per_channel(rounded, x)
        rest = deviation.sum(axes).double() / count
        squares = deviation.square_().sum(axes).double() / count
        found = rounded.double() + rest, (squares - rest * rest).clamp_(min=0.0)
    mean, variance = (moment.cpu().numpy().astype(np.float64) for moment in found)
    return mean, variance


def _moments_of_images(x: Tensor) -> tuple[Array, Array]:
    """Return the moments of each channel, combined from those of its images as the moments of ranks are.

    Those of an image are as exact as the dtype of `x` is: where a mean is 1,000 standard deviations, the
    variance of a float32 batch has a relative error of 3e-6.
    """
    images, channels = x.shape[:2]
    values = x.numel() // (images * channels)
    found = torch.native_group_norm(x, None, None, images, channels, values, channels, 0.0)
    means, scales = (each.view(images, channels).numpy().astype(np.float64) for each in found[1:])
    mean = means.mean(axis=0)
    with np.errstate(all="ignore"):  # what is infinite or not a number shows in the result
        return mean, (scales**-2.0 + (means - mean) ** 2).mean(axis=0)


class Normalise(torch.autograd.Function):
    """Normalisation with given statistics, whose dependence on the input the backward pass accounts for."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: Statistics,
        eps: float,
        comm: Communicator,
        label: str,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.statistics, ctx.eps, ctx.comm, ctx.label = statistics, eps, comm, label
        ctx.dtypes = [None if p is None else p.dtype for p in (weight, bias)]
        dtype = _working_dtype(x)
        ctx.moments = [of_channels(values, dtype, x.device) for values in statistics[1:]]
        if x.numel() == 0:
            return torch.empty_like(x)
        weight, bias = (None if p is None else p.to(dtype) for p in (weight, bias))
        return _normalised(x.to(dtype), ctx.moments, weight, bias, eps).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors  # which a checkpoint gives once
        with torch.no_grad():
            found = Normalise._backward(ctx, x, weight, gradient)
        if not torch.is_grad_enabled():
            return found
        final: Any = _Final
        return tuple(None if each is None else final.apply(each, gradient, x, ctx.label) for each in found)

    @staticmethod
    def _backward(ctx: Any, x: Tensor, weight: Tensor | None, gradient: Tensor) -> tuple[Tensor | None, ...]:
        dtype = _working_dtype(x)
        has_kernels = _has_kernels(x) and x.numel() > 0
        kind = _PassBackOnCpu if has_kernels else _PassBack
        pass_back = kind(x.to(dtype), gradient.to(dtype), ctx.statistics, ctx.moments, ctx.eps)
        sums, *own = pass_back.sums()
        grad_bias, grad_weight = (
            one.to(dtype, copy=True) if is_needed else None
            for one, dtype, is_needed in zip(own, ctx.dtypes[::-1], ctx.needs_input_grad[2:0:-1], strict=True)
        )
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, grad_bias, None, None, None, None
        ctx.comm.allreduce(sums, op="sum", out=sums, name=f"{ctx.label} backward", comm_dtype="float32")
        found = pass_back.combined(sums / max(ctx.statistics.samples, 1.0), weight)
        return found.to(x.dtype), grad_weight, grad_bias, None, None, None, None


class _PassBack:
    """The two passes over a batch and its gradient of which the backward pass of a normalisation consists, by
    operations that every device has."""

    def __init__(
        self, x: Tensor, gradient: Tensor, statistics: Statistics, moments: list[Tensor], eps: float
    ) -> None:
        self._x, self._gradient, self._moments, self._eps = x, gradient, moments, eps
        self._scale = 1.0 / np.sqrt(statistics.variance + eps)

    def sums(self) -> tuple[Any, Tensor, Tensor]:
        """Return two sums over this rank's batch, float64 of shape (2, channels), and each of them: of the
        gradient, and of the gradient times the normalised input."""
        axes = _all_but_channels(self._x)
        self._deviation = self._x - _per_channel(self._moments[0], self._x)
        products = (self._gradient * self._deviation).sum(axes).double() * self._exactly(self._scale)
        found = torch.stack([self._gradient.sum(axes).double(), products])
        return found, found[0], found[1]

    def combined(self, means: Any, weight: Tensor | None) -> Tensor:
        """Return factor * (gradient - mean of gradients - normalised input * mean of gradients times it), of
        the shape of the input, with the factor weight / standard deviation.

        Args:
            means: Of the batches of all ranks, in the form and order of `sums`.
            weight: Shape (channels,).
        """
        scale = self._exactly(self._scale)
        factor = scale if weight is None else scale * weight.double()
        found = self._deviation.mul_(self._as(-factor * means[1] * scale))
        found.addcmul_(self._gradient, self._as(factor))
        return found.add_(self._as(-factor * means[0]))

    def _exactly(self, values: Array) -> Tensor:
        return of_channels(values, torch.float64, self._x.device)

    def _as(self, values: Tensor) -> Tensor:
        return _per_channel(values.to(self._x.dtype), self._x)


class _PassBackOnCpu(_PassBack):
    """The backward pass on a CPU: Torch's own kernels, which read and write less, and NumPy for values of
    channels."""

    def sums(self) -> tuple[Any, Tensor, Tensor]:
        scale = self._of_channels(self._scale)
        _, products, gradients = torch.ops.aten.native_batch_norm_backward(
            *(self._gradient, self._x, None, None, None, self._moments[0], scale, True, self._eps),
            [False, True, True],
        )
        return np.array([gradients.numpy(), products.numpy()], np.float64), gradients, products

    def combined(self, means: Any, weight: Tensor | None) -> Tensor:
        # The weight is copied, since a tensor whose memory NumPy has seen cannot be resized any more.
        factor = self._scale
        if weight is not None:
            factor = factor * weight.to(torch.float64, copy=True).numpy()
        found = _normalised(
            *(self._x, self._moments, self._of_channels(-factor * means[1])),
            *(self._of_channels(-factor * means[0]), self._eps),
        )
        return found.addcmul_(self._gradient, _per_channel(self._of_channels(factor), self._x))

    def _of_channels(self, values: Array) -> Tensor:
        return of_channels(values, self._x.dtype, self._x.device)


class _Final(torch.autograd.Function):
    """A gradient that has no gradient: the sums over ranks in it would need those of all ranks."""

    @staticmethod
    def forward(ctx: Any, found: Tensor, gradient: Tensor, x: Tensor, label: str) -> Tensor:
        ctx.label = label
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UsageError(
            f"{ctx.label}: a gradient of its gradient is asked for, as by create_graph=True or a gradient "
            "penalty, and a SyncBatchNorm has none: use torch.nn.BatchNorm there, or take the penalty in "
            "eval()"
        )


def of_channels(values: Array, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return values of channels as a tensor of its own of this dtype, float32 or float64."""
    found = values.astype(np.float32 if dtype is torch.float32 else np.float64)
    return torch.from_numpy(found).to(device)


def _normalised(
    x: Tensor, moments: Sequence[Tensor], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    mean, variance = moments
    return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, True)


def _has_kernels(x: Tensor) -> bool:
    """Return whether Torch's kernels for a CPU apply: a channel of an image lies in one piece of memory."""
    return x.device.type == "cpu" and x.is_contiguous()


def _working_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _all_but_channels(x: Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *([1] * (like.dim() - 2)))
