"""Batch normalisation as Caffe splits it: BatchNorm normalises, Scale learns factor and offset."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from multiring.derived import derived
from multiring.models.caffe.blob import Shape, decimal
from multiring.models.caffe.layer import Gradients, Layer, Tensors, register
from multiring.models.caffe.schema import TEST
from multiring.torch.batch_statistics import Normalise, global_statistics, of_channels

__all__: list[str] = []


@register("BatchNorm")
class BatchNorm(Layer):
    """Normalises each channel; its three blobs are sums of means, of variances, and of weights.

    In training `blobs[2]` becomes `fraction * blobs[2] + 1`, and the mean and the unbiased variance of the
    batch are added to `fraction` times the other two. In testing both are divided by `blobs[2]`.
    """

    def setup(self, bottoms: Sequence[Shape]) -> None:
        param = self.param.batch_norm_param
        if len(bottoms[0]) < 2:
            raise self.error(f"BatchNorm takes a blob (n, channels, ...), not shape {bottoms[0]}")
        self._channels = bottoms[0][1]
        self._eps = decimal(param.eps)
        self._fraction = decimal(param.moving_average_fraction)
        self._stored = (
            param.use_global_stats if param.HasField("use_global_stats") else self.context.phase == TEST
        )
        for number, spec in enumerate(self.param.param):
            if len(self.param.param) == 3:  # of the time when they had to be given: Caffe sets them to zero
                spec.lr_mult = spec.decay_mult = 0.0
            if spec.lr_mult != 0:
                raise self.error(
                    "statistics of BatchNorm cannot be learned; set lr_mult: 0", "param", number, "lr_mult"
                )
        while len(self.param.param) < 3:
            self.param.param.add(lr_mult=0, decay_mult=0)
        for extent in (self._channels, self._channels, 1):
            self.add_blob((extent,))

    def infer(self, bottoms: Sequence[Shape]) -> list[Shape]:
        if bottoms[0][1] != self._channels:
            raise self.error(f"the statistics are for {self._channels} channels, not {bottoms[0][1]}")
        return [bottoms[0]]

    def forward(self, bottoms: Tensors) -> list[torch.Tensor]:
        x = self._input = bottoms[0]
        if self._stored:
            total = float(self.blobs[2].tensor[0])
            factor = 1.0 / total if total else 0.0
            self._mean = self.blobs[0].tensor * factor
            self._variance = self.blobs[1].tensor * factor
            return [self._normalised(x)]
        if self.context.comm is not None and self.context.comm.size > 1:
            return [self._forward_over_ranks(x)]
        self._mean, unbiased = (x.new_zeros(self._channels) for _ in range(2))
        if x.numel() // self._channels < 2:
            # A single value per channel is its own mean; the kernel below would divide by zero.
            if not x.numel():
                return [x]
            self._mean = x.reshape(self._channels).clone()
            self._saved = (self._mean, torch.full_like(self._mean, self._eps).rsqrt())
            self._track(self._mean, unbiased)
            return [torch.zeros_like(x)]
        # Momentum 1 makes the kernel leave the mean and the unbiased variance of the batch.
        y, *saved = torch.native_batch_norm(x, None, None, self._mean, unbiased, True, 1.0, self._eps)
        self._saved = (saved[0], saved[1])
        self._track(self._mean, unbiased)
        return [y]

    def backward(self, gradients: Gradients, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        x = self._input
        if self._stored:
            return [gradient * self._per_channel((self._variance + self._eps).rsqrt())]
        if self.context.comm is not None and self.context.comm.size > 1:
            (bottom,) = torch.autograd.grad(self._output, self._leaf, gradient)
            del self._output, self._leaf
            return [bottom]
        if not x.numel():
            return [gradient]
        bottom, _, _ = torch.ops.aten.native_batch_norm_backward(
            *(gradient, x, None, None, None, *self._saved, True, self._eps, [True, False, False])
        )
        return [bottom]

    def _forward_over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise over the batches of all ranks, which may differ in size and be empty. Collective."""
        assert self.context.comm is not None
        comm = derived(self.context.comm, "sync_batchnorm")
        label = f"BatchNorm {self.name}"
        statistics = global_statistics(x, comm, label)
        count = statistics.samples
        if count:
            unbiased = statistics.variance * (count / (count - 1) if count > 1 else 1.0)
            moments = (of_channels(each, x.dtype, x.device) for each in (statistics.mean, unbiased))
            self._track(*moments)
        self._leaf = x.detach().requires_grad_(True)
        with torch.enable_grad():
            self._output: torch.Tensor = Normalise.apply(  # type: ignore[no-untyped-call]
                self._leaf, None, None, statistics, self._eps, comm, label
            )
        result: torch.Tensor = self._output.detach()
        return result

    def _track(self, mean: torch.Tensor, unbiased: torch.Tensor) -> None:
        for blob, value in zip(self.blobs, (mean, unbiased, torch.ones_like(mean[:1])), strict=True):
            blob.tensor.mul_(self._fraction).add_(value)

    def _normalised(self, x: torch.Tensor) -> torch.Tensor:
        scale = (self._variance + self._eps).rsqrt()
        return (x - self._per_channel(self._mean)) * self._per_channel(scale)

    def _per_channel(self, values: torch.Tensor) -> torch.Tensor:
        return values.view(1, -1, *([1] * (self._input.dim() - 2)))


@register("Scale")
class Scale(Layer):
    """A factor for the axes from `axis` on, learned or a second bottom; with `bias_term` a learned offset."""

    bottoms = (1, 2)

    def setup(self, bottoms: Sequence[Shape]) -> None:
        param = self.param.scale_param
        count = len(bottoms[1]) if len(bottoms) > 1 else param.num_axes
        is_single = len(bottoms) > 1 and count == 0  # one factor for all, whatever `axis` says
        axis = 0 if is_single else self.axis(param.axis, bottoms[0], "scale_param", "axis")
        end = len(bottoms[0]) if count == -1 else axis + count
        if count < -1 or end > len(bottoms[0]):
            raise self.error(
                f"shape {bottoms[0]} has no {count} axes from {axis} on", "scale_param", "num_axes"
            )
        shape = bottoms[0][axis:end]
        self._range = (axis, end)
        self._is_learned = len(bottoms) == 1
        if self._is_learned:
            if not param.HasField("filler"):
                param.filler.value = 1
            self.add_blob(shape, "scale_param", "filler")
        if param.bias_term:
            self.add_blob(shape, "scale_param", "bias_filler")
        self._offset = len(self.blobs) - 1 if param.bias_term else None
        self._others = [k for k in range(len(bottoms[0])) if not axis <= k < end]

    def infer(self, bottoms: Sequence[Shape]) -> list[Shape]:
        axis, end = self._range
        factor = bottoms[1] if len(bottoms) > 1 else self.blobs[0].shape
        if bottoms[0][axis:end] != factor:
            raise self.error(f"a factor of shape {factor} does not fit axes {axis} to {end} of {bottoms[0]}")
        return [bottoms[0]]

    def forward(self, bottoms: Tensors) -> list[torch.Tensor]:
        self._input = bottoms[0]
        self._factor = self.blobs[0].tensor if self._is_learned else bottoms[1]
        scale = self._viewed(self._factor)
        if self._offset is None:
            return [bottoms[0] * scale]
        return [torch.addcmul(self._viewed(self.blobs[self._offset].tensor), bottoms[0], scale)]

    def backward(self, gradients: Gradients, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        if self._offset is not None and self.learns(self._offset):
            self.blobs[self._offset].gradient.add_(self._summed(gradient))
        if self._is_learned and self.learns(0):
            self.blobs[0].gradient.add_(self._summed(gradient * self._input))
        bottom = gradient * self._viewed(self._factor) if wanted[0] else None
        if self._is_learned:
            return [bottom]
        return [bottom, self._summed(gradient * self._input) if wanted[1] else None]

    def _viewed(self, values: torch.Tensor) -> torch.Tensor:
        axis, end = self._range
        return values.view(*[1] * axis, *values.shape, *[1] * (self._input.dim() - end))

    def _summed(self, values: torch.Tensor) -> torch.Tensor:
        return values.sum(self._others) if self._others else values
