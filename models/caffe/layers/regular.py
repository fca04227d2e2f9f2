"""Dropout and local response normalisation, which nets before batch normalisation regularise with."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch.nn import functional

from multiring.models.caffe.blob import Shape, decimal
from multiring.models.caffe.layer import Gradients, Layer, Tensors, register
from multiring.models.caffe.schema import TEST

__all__: list[str] = []

_WITHIN_CHANNEL = 1


@register("Dropout")
class Dropout(Layer):
    """In training each value is zero with probability `dropout_ratio`, and the others are scaled up by
    1 / (1 - dropout_ratio). Each rank draws its own numbers."""

    def setup(self, bottoms: Sequence[Shape]) -> None:
        self._ratio = decimal(self.param.dropout_param.dropout_ratio)
        if not 0 < self._ratio < 1:
            raise self.error("dropout_ratio has to be more than 0 and less than 1", "dropout_param")
        seed = zlib.crc32(f"{self.context.seed} {self.context.shard[0]} {self.name}".encode())
        self._generator = torch.Generator().manual_seed(seed)

    def forward(self, bottoms: Tensors) -> list[torch.Tensor]:
        x = bottoms[0]
        if self.context.phase == TEST:
            return [x]
        kept = torch.rand(x.shape, generator=self._generator) >= self._ratio
        self._factors = kept.to(x.device, x.dtype).mul_(1 / (1 - self._ratio))
        return [x * self._factors]

    def backward(self, gradients: Gradients, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        return [gradient if self.context.phase == TEST else gradient * self._factors]


@register("LRN")
class LRN(Layer):
    """Divides by (k + alpha / n * sum of squares) ^ beta, the sum over n = `local_size` channels around, or
    with WITHIN_CHANNEL over n = `local_size` x `local_size` places around, where k is 1."""

    def setup(self, bottoms: Sequence[Shape]) -> None:
        param = self.param.lrn_param
        if len(bottoms[0]) != 4:
            raise self.error(f"LRN takes images (n, channels, height, width), not shape {bottoms[0]}")
        if param.local_size % 2 == 0:
            raise self.error("local_size has to be odd", "lrn_param", "local_size")
        self._size, self._is_within = param.local_size, param.norm_region == _WITHIN_CHANNEL
        self._alpha, self._beta = decimal(param.alpha), decimal(param.beta)
        self._k = 1.0 if self._is_within else decimal(param.k)

    def forward(self, bottoms: Tensors) -> list[torch.Tensor]:
        self._leaf = bottoms[0].detach().requires_grad_()
        with torch.enable_grad():
            self._output = self._leaf * (self._k + self._alpha * self._mean_square()).pow(-self._beta)
        return [self._output.detach()]

    def backward(self, gradients: Gradients, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        (gradient,) = gradients
        (bottom,) = torch.autograd.grad(self._output, self._leaf, gradient)
        del self._output, self._leaf
        return [bottom]

    def _mean_square(self) -> torch.Tensor:
        square, pad = self._leaf.square(), self._size // 2
        if self._is_within:
            return functional.avg_pool2d(square, self._size, 1, pad)
        kernel = (self._size, 1, 1)
        return functional.avg_pool3d(square[:, None], kernel, 1, (pad, 0, 0))[:, 0]
