"""Convolution and pooling over images `(n, channels, height, width)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from multiring.models.caffe.blob import Shape
from multiring.models.caffe.layer import Gradients, Layer, Tensors, register

__all__: list[str] = []

_MAX, _AVE = 0, 1
_FLOOR = 1
Pair = tuple[int, int]


def _check_image(layer: Layer, shape: Shape) -> None:
    if len(shape) != 4:
        raise layer.error(f"{layer.type} takes images (n, channels, height, width), not shape {shape}")


@register("Convolution")
class Convolution(Layer):
    """Weights `(out, in / group, kernel_h, kernel_w)` and a bias `(out,)`."""

    def setup(self, bottoms: Sequence[Shape]) -> None:
        param = self.param.convolution_param
        _check_image(self, bottoms[0])
        self._kernel = self._pair(param, "kernel_size", "kernel_h", "kernel_w", 0)
        self._stride = self._pair(param, "stride", "stride_h", "stride_w", 1)
        self._pad = self._pair(param, "pad", "pad_h", "pad_w", 0)
        self._dilation = self._pair(param, "dilation", "", "", 1)
        if not param.num_output or 0 in self._kernel or 0 in self._stride or 0 in self._dilation:
            raise self.error(
                "num_output, kernel_size, stride and dilation have to be at least 1", "convolution_param"
            )
        channels = bottoms[0][1]
        if param.group < 1 or channels % param.group or param.num_output % param.group:
            raise self.error(
                f"{channels} inputs and {param.num_output} outputs cannot be split in {param.group} groups",
                *("convolution_param", "group"),
            )
        self._channels = channels
        shape = (param.num_output, channels // param.group, *self._kernel)
        self.add_blob(shape, "convolution_param", "weight_filler")
        if param.bias_term:
            self.add_blob((param.num_output,), "convolution_param", "bias_filler")

    def _pair(self, param: Any, both: str, vertical: str, horizontal: str, default: int) -> Pair:
        values = list(getattr(param, both))
        if vertical and (param.HasField(vertical) or param.HasField(horizontal)):
            if values:
                raise self.error(f"give {both} or {vertical} and {horizontal}", "convolution_param", both)
            return getattr(param, vertical), getattr(param, horizontal)
        if len(values) > 2:
            raise self.error(f"{both} has {len(values)} values for 2 axes", "convolution_param", both)
        return (values[0], values[-1]) if values else (default, default)

    def infer(self, bottoms: Sequence[Shape]) -> list[Shape]:
        _check_image(self, bottoms[0])
        if bottoms[0][1] != self._channels:
            raise self.error(f"the weights are for {self._channels} channels, not {bottoms[0][1]}")
        height, width = (
            (extent + 2 * pad - (dilation * (kernel - 1) + 1)) // stride + 1
            for extent, kernel, pad, stride, dilation in zip(
                bottoms[0][2:], self._kernel, self._pad, self._stride, self._dilation, strict=True
            )
        )
        if min(height, width) < 1:
            raise self.error(f"images of {bottoms[0][2:]} pixels are too small", "convolution_param")
        return [(bottoms[0][0], self.param.convolution_param.num_output, height, width)]

    def forward(self, bottoms: Tensors) -> list[torch.Tensor]:
        self._input = bottoms[0]
        bias = self.blobs[1].tensor if len(self.blobs) > 1 else None
        group = self.param.convolution_param.group
        weight = self.blobs[0].tensor
        return [functional.conv2d(bottoms[0], weight, bias, self._stride, self._pad, self._dilation, group)]

    def backward(self, gradients: Gradients, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        has_bias = len(self.blobs) > 1
        learns = [self.learns(0), has_bias and self.learns(1)]
        bottom, weight, bias = torch.ops.aten.convolution_backward(
            *(gradients[0], self._input, self.blobs[0].tensor),
            [self.param.convolution_param.num_output] if has_bias else None,
            *(self._stride, self._pad, self._dilation, False, (0, 0), self.param.convolution_param.group),
            [wanted[0], *learns],
        )
        for blob, learnt, gradient in zip(self.blobs, learns, (weight, bias), strict=False):
            if learnt:
                blob.gradient.add_(gradient)
        return [bottom if wanted[0] else None]


@register("Pooling")
class Pooling(Layer):
    """Maximum or mean of windows; sizes are rounded up unless `round_mode: FLOOR`.

    A window that ends outside is cut off: a mean divides by the part that lies within the image and its
    padding. A window that begins outside (a stride above the kernel size makes some) has in Caffe the least
    float32 as its maximum and no number as its mean; it has here, too, and no gradient.
    """

    def setup(self, bottoms: Sequence[Shape]) -> None:
        param = self.param.pooling_param
        _check_image(self, bottoms[0])
        if param.pool not in (_MAX, _AVE):
            raise self.error("pool: STOCHASTIC is not supported", "pooling_param", "pool")
        sized = any(param.HasField(name) for name in ("kernel_size", "kernel_h", "kernel_w"))
        if param.global_pooling == sized:
            raise self.error("give either a kernel size or global_pooling", "pooling_param")
        self._pad = self._pair(param, "pad")
        self._stride = self._pair(param, "stride")
        if param.global_pooling and (self._pad != (0, 0) or self._stride != (1, 1)):
            raise self.error("global_pooling goes with pad 0 and stride 1 only", "pooling_param")
        self._sized: Pair = (0, 0) if param.global_pooling else self._pair(param, "kernel_size")
        if not param.global_pooling and 0 in (*self._sized, *self._stride):
            raise self.error("kernel size and stride have to be at least 1", "pooling_param")
        if not param.global_pooling and any(
            pad >= kernel for pad, kernel in zip(self._pad, self._sized, strict=True)
        ):
            raise self.error("pad has to be smaller than the kernel", "pooling_param", "pad")

    def _pair(self, param: Any, both: str) -> Pair:
        base = both.removesuffix("_size")
        if param.HasField(f"{base}_h") or param.HasField(f"{base}_w"):
            if param.HasField(both):
                raise self.error(f"give {both} or {base}_h and {base}_w", "pooling_param", both)
            return getattr(param, f"{base}_h"), getattr(param, f"{base}_w")
        return getattr(param, both), getattr(param, both)

    def infer(self, bottoms: Sequence[Shape]) -> list[Shape]:
        _check_image(self, bottoms[0])
        count, channels, *extents = bottoms[0]
        self._kernel: Pair = (
            (extents[0], extents[1]) if self.param.pooling_param.global_pooling else self._sized
        )
        self._pooled = (self._windows(extents[0], 0), self._windows(extents[1], 1))
        return [(count, channels, *self._pooled)]

    def _windows(self, extent: int, k: int) -> int:
        """Number of windows along an axis of an image."""
        pad, kernel, stride = self._pad[k], self._kernel[k], self._stride[k]
        span = extent + 2 * pad - kernel
        is_floor = self.param.pooling_param.round_mode == _FLOOR
        pooled = (span // stride if is_floor else -(-span // stride)) + 1
        if pad and (pooled - 1) * stride >= extent + pad:  # the last window would lie in the padding
            pooled -= 1
        if pooled < 1:
            raise self.error(
                f"no window of {kernel} pixels fits an image of {extent} with stride {stride} and pad {pad}",
                "pooling_param",
            )
        return pooled

    def forward(self, bottoms: Tensors) -> list[torch.Tensor]:
        x = self._shown = bottoms[0]
        self._extents = (x.shape[2], x.shape[3])
        is_mean = self.param.pooling_param.pool == _AVE
        if not len(x):
            return [x.new_zeros(self.infer([tuple(x.shape)])[0])]
        pad, ceil = self._pad, self.param.pooling_param.round_mode != _FLOOR
        self._is_widened = not all(self._is_plain(k) for k in (0, 1))
        if self._is_widened:
            margins = self._margins(0), self._margins(1)
            empty = 0.0 if is_mean else torch.finfo(torch.float32).min
            self._shown, pad, ceil = functional.pad(x, (*margins[1], *margins[0]), value=empty), (0, 0), False
        self._sizes = (self._kernel, self._stride, pad)
        self._ceil = ceil
        if not is_mean:
            y, self._indices = torch.ops.aten.max_pool2d_with_indices(
                self._shown, *self._sizes, (1, 1), self._ceil
            )
            return [y]
        if self._is_widened:
            return [functional.avg_pool2d(self._shown, *self._sizes, divisor_override=1) / self._areas()]
        return [functional.avg_pool2d(self._shown, *self._sizes, ceil_mode=self._ceil)]

    def backward(self, gradients: Gradients, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        x = self._shown
        if not len(x):
            return [torch.zeros_like(x)]
        if self.param.pooling_param.pool == _AVE:
            divisor = 1 if self._is_widened else None
            gradient = gradient / self._areas() if self._is_widened else gradient
            bottom = torch.ops.aten.avg_pool2d_backward(gradient, x, *self._sizes, self._ceil, True, divisor)
        else:
            bottom = torch.ops.aten.max_pool2d_with_indices_backward(
                gradient, x, *self._sizes, (1, 1), self._ceil, self._indices
            )
        if self._is_widened:
            (top, _), (left, _) = self._margins(0), self._margins(1)
            height, width = self._extents
            bottom = bottom[:, :, top : top + height, left : left + width].contiguous()
        return [bottom]

    def _is_plain(self, k: int) -> bool:
        """Whether Torch pools along an axis as Caffe does: there no window may begin outside."""
        pad, kernel, extent = self._pad[k], self._kernel[k], self._extents[k]
        last = (self._pooled[k] - 1) * self._stride[k]
        return 2 * pad <= kernel <= extent + 2 * pad and last < extent + pad

    def _margins(self, k: int) -> Pair:
        """What to add before and after an axis so that all windows lie inside."""
        end = (self._pooled[k] - 1) * self._stride[k] + self._kernel[k] - self._pad[k]
        return self._pad[k], max(end - self._extents[k], 0)

    def _areas(self) -> torch.Tensor:
        """By what the sum of each window is divided."""
        x, lengths = self._shown, []
        for k in (0, 1):
            numbers = torch.arange(self._pooled[k], dtype=x.dtype, device=x.device)
            starts = numbers * self._stride[k] - self._pad[k]
            lengths.append((starts + self._kernel[k]).clamp(max=self._extents[k] + self._pad[k]) - starts)
        return torch.outer(*lengths)
