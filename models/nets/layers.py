"""The kinds of layers that a specification is made of: plain data, no framework.

Each layer names the layers that it reads. Shapes are without the batch and channels first, as
`resnet_spec` says. A framework says what each kind becomes in a `match` over them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from multiring.errors import UsageError

__all__ = [
    "Add",
    "BatchNorm",
    "Conv",
    "Dense",
    "GlobalAveragePool",
    "Layer",
    "MaxPool",
    "Parameter",
    "Relu",
    "Shape",
]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """One trained tensor.

    Attributes:
        name: `<layer name>.weight` or `<layer name>.bias`.
        shape: Channels first.
        kind: "conv" and "dense" are weights that decay; "scale", "shift" and "bias" are not.
    """

    name: str
    shape: Shape
    kind: Literal["conv", "scale", "shift", "dense", "bias"]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def decays(self) -> bool:
        """Whether weight decay applies to it."""
        return self.kind in ("conv", "dense")


@dataclass(frozen=True)
class _Layer:
    """What every layer has: its name and those of the layers that it reads."""

    name: str
    inputs: tuple[str, ...]

    def parameters(self) -> tuple[Parameter, ...]:
        """Its trained tensors."""
        return ()

    def output_shape(self, *inputs: Shape) -> Shape:
        """Shape of its result; raises UsageError where the inputs do not fit."""
        return inputs[0]


@dataclass(frozen=True)
class _Window(_Layer):
    """Slides a square window over height and width; `padding` pixels on every side."""

    kernel: int
    stride: int
    padding: int

    def output_shape(self, *inputs: Shape) -> Shape:
        return (inputs[0][0], *map(self.output_extent, inputs[0][1:]))

    def output_extent(self, extent: int) -> int:
        """Height or width of the result, from that of the input."""
        result: int = (extent + 2 * self.padding - self.kernel) // self.stride + 1
        if result < 1:
            raise UsageError(
                f"images are too small: layer {self.name} would get {extent} pixels; use larger ones"
            )
        return result


@dataclass(frozen=True)
class Conv(_Window):
    """Square convolution without bias; `padding` zeros on every side."""

    in_channels: int
    out_channels: int

    def parameters(self) -> tuple[Parameter, ...]:
        shape = (self.out_channels, self.in_channels, self.kernel, self.kernel)
        return (Parameter(f"{self.name}.weight", shape, "conv"),)

    def output_shape(self, *inputs: Shape) -> Shape:
        return (self.out_channels, *super().output_shape(*inputs)[1:])


@dataclass(frozen=True)
class BatchNorm(_Layer):
    """Batch normalisation per channel.

    Training normalises with the biased variance of the batch. Running statistics move by
    `new = (1 - momentum) * old + momentum * batch`, the running variance with the unbiased variance.
    `closes_block` marks the last one of a residual branch, whose scale may start at zero.
    """

    channels: int
    eps: float = 1e-5
    momentum: float = 0.1
    closes_block: bool = False

    def parameters(self) -> tuple[Parameter, ...]:
        shape = (self.channels,)
        return Parameter(f"{self.name}.weight", shape, "scale"), Parameter(
            f"{self.name}.bias", shape, "shift"
        )


@dataclass(frozen=True)
class Relu(_Layer):
    """max(x, 0)."""


@dataclass(frozen=True)
class MaxPool(_Window):
    """Square maximum pooling; padding never wins the maximum."""


@dataclass(frozen=True)
class Add(_Layer):
    """Sum of two inputs of the same shape."""

    def output_shape(self, *inputs: Shape) -> Shape:
        if inputs[0] != inputs[1]:
            raise UsageError(f"layer {self.name} adds shapes {inputs[0]} and {inputs[1]}")
        return inputs[0]


@dataclass(frozen=True)
class GlobalAveragePool(_Layer):
    """Mean over height and width: `(channels, h, w)` becomes `(channels,)`."""

    def output_shape(self, *inputs: Shape) -> Shape:
        return inputs[0][:1]


@dataclass(frozen=True)
class Dense(_Layer):
    """`x @ weight.T + bias`."""

    in_features: int
    out_features: int

    def parameters(self) -> tuple[Parameter, ...]:
        shape = (self.out_features, self.in_features)
        return (
            Parameter(f"{self.name}.weight", shape, "dense"),
            Parameter(f"{self.name}.bias", shape[:1], "bias"),
        )

    def output_shape(self, *inputs: Shape) -> Shape:
        return (self.out_features,)


Layer = Conv | BatchNorm | Relu | MaxPool | Add | GlobalAveragePool | Dense
