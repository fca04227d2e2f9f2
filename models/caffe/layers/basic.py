"""Layers without learned blobs, but for the inner product."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from multiring.models.caffe.blob import Shape, decimal
from multiring.models.caffe.layer import Gradients, Layer, Tensors, register

__all__: list[str] = []

_PROD, _SUM, _MAX = 0, 1, 2
_MANY = 1 << 20


@register("Split")
class Split(Layer):
    """Copies of one blob; a net inserts it where several layers read the same blob."""

    tops = (1, _MANY)

    def infer(self, bottoms: Sequence[Shape]) -> list[Shape]:
        return [bottoms[0]] * len(self.param.top)

    def forward(self, bottoms: Tensors) -> list[torch.Tensor]:
        return [bottoms[0]] * len(self.param.top)

    def backward(self, gradients: Gradients, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        total: torch.Tensor | None = None
        for gradient in gradients:
            if gradient is not None:
                total = gradient if total is None else total + gradient
        return [total]


@register("ReLU")
class ReLU(Layer):
    """max(x, 0), or x * negative_slope below zero."""

    def forward(self, bottoms: Tensors) -> list[torch.Tensor]:
        self._slope = decimal(self.param.relu_param.negative_slope)
        self._input = bottoms[0]
        if self._slope:
            return [torch.nn.functional.leaky_relu(bottoms[0], self._slope)]
        return [torch.relu(bottoms[0])]

    def backward(self, gradients: Gradients, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        if self._slope:
            return [torch.where(self._input > 0, gradient, gradient * self._slope)]
        return [torch.ops.aten.threshold_backward(gradient, self._input, 0)]


@register("Eltwise")
class Eltwise(Layer):
    """Sum (with coefficients), product or maximum of blobs of one shape."""

    bottoms = (2, _MANY)

    def setup(self, bottoms: Sequence[Shape]) -> None:
        param = self.param.eltwise_param
        self._operation = param.operation
        self._factors = [decimal(factor) for factor in param.coeff] or [1.0] * len(bottoms)
        if param.coeff and self._operation != _SUM:
            raise self.error("coeff goes with operation SUM only", "eltwise_param", "coeff")
        if len(self._factors) != len(bottoms):
            raise self.error(
                f"{len(bottoms)} bottoms have {len(self._factors)} values of coeff", "eltwise_param", "coeff"
            )
        if self._operation == _MAX and len(bottoms) != 2:
            raise self.error("MAX of more than 2 blobs is not supported", "eltwise_param", "operation")

    def infer(self, bottoms: Sequence[Shape]) -> list[Shape]:
        if len(set(bottoms)) > 1:
            raise self.error(f"bottoms have different shapes: {', '.join(map(str, bottoms))}")
        return [bottoms[0]]

    def forward(self, bottoms: Tensors) -> list[torch.Tensor]:
        if self._operation == _SUM:
            total = bottoms[0] if self._factors[0] == 1 else bottoms[0] * self._factors[0]
            for bottom, factor in zip(bottoms[1:], self._factors[1:], strict=True):
                total = torch.add(total, bottom, alpha=factor)
            return [total]
        self._inputs = list(bottoms)
        if self._operation == _MAX:
            return [torch.maximum(*bottoms)]
        product = bottoms[0]
        for bottom in bottoms[1:]:
            product = product * bottom
        self._output = product
        return [product]

    def backward(self, gradients: Gradients, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        if self._operation == _SUM:
            return [gradient if factor == 1 else gradient * factor for factor in self._factors]
        if self._operation == _MAX:
            first = self._inputs[0] > self._inputs[1]
            return [gradient * first, gradient * ~first]
        if not self.param.eltwise_param.stable_prod_grad:  # as in Caffe, no number where a bottom is zero
            return [gradient * (self._output / value) for value in self._inputs]
        results: list[torch.Tensor | None] = []
        for number in range(len(self._inputs)):
            product = gradient
            for other, value in enumerate(self._inputs):
                if other != number:
                    product = product * value
            results.append(product)
        return results


@register("InnerProduct")
class InnerProduct(Layer):
    """`x @ weight.T + bias` over the axes from `axis` on; with `transpose` the weight lies the other way."""

    def setup(self, bottoms: Sequence[Shape]) -> None:
        param = self.param.inner_product_param
        if not param.num_output:
            raise self.error("num_output is missing", "inner_product_param")
        self._axis = self.axis(param.axis, bottoms[0], "inner_product_param", "axis")
        self._inputs = math.prod(bottoms[0][self._axis :])
        shape = (self._inputs, param.num_output) if param.transpose else (param.num_output, self._inputs)
        self.add_blob(shape, "inner_product_param", "weight_filler")
        if param.bias_term:
            self.add_blob((param.num_output,), "inner_product_param", "bias_filler")

    def infer(self, bottoms: Sequence[Shape]) -> list[Shape]:
        found = math.prod(bottoms[0][self._axis :])
        if found != self._inputs:
            raise self.error(f"the weights are for {self._inputs} inputs, the bottom has {found}")
        return [(*bottoms[0][: self._axis], self.param.inner_product_param.num_output)]

    def forward(self, bottoms: Tensors) -> list[torch.Tensor]:
        x = bottoms[0]
        self._shape = x.shape
        self._flat = x.reshape(math.prod(x.shape[: self._axis]), self._inputs)
        bias = self.blobs[1].tensor if len(self.blobs) > 1 else None
        y = torch.nn.functional.linear(self._flat, self._weight(), bias)
        return [y.reshape(*x.shape[: self._axis], -1 if len(y) else y.shape[1])]

    def backward(self, gradients: Gradients, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        flat = gradient.reshape(len(self._flat), self.param.inner_product_param.num_output)
        if self.learns(0):
            if self.param.inner_product_param.transpose:
                self.blobs[0].gradient.addmm_(self._flat.t(), flat)
            else:
                self.blobs[0].gradient.addmm_(flat.t(), self._flat)
        if len(self.blobs) > 1 and self.learns(1):
            self.blobs[1].gradient.add_(flat.sum(0))
        return [(flat @ self._weight()).reshape(self._shape) if wanted[0] else None]

    def _weight(self) -> torch.Tensor:
        weight = self.blobs[0].tensor
        return weight.t() if self.param.inner_product_param.transpose else weight


@register("Softmax")
class Softmax(Layer):
    """Probabilities along an axis."""

    def setup(self, bottoms: Sequence[Shape]) -> None:
        self._axis = self.axis(self.param.softmax_param.axis, bottoms[0], "softmax_param", "axis")

    def forward(self, bottoms: Tensors) -> list[torch.Tensor]:
        self._output = torch.softmax(bottoms[0], self._axis)
        return [self._output]

    def backward(self, gradients: Gradients, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        weighted = gradient * self._output
        return [weighted - self._output * weighted.sum(self._axis, keepdim=True)]
