"""The one ResNet specification that every framework builds: plain data, no framework.

A specification is a list of layers in the order in which they run. Each layer names the layers that it reads
(`INPUT` is the image batch), so a framework builds the network by walking the list once. Shapes are written
channels first: images `(channels, height, width)`, convolution weights `(out, in, kernel, kernel)`, dense
weights `(out, in)`; `weights.to_channels_last` converts a weight for frameworks that work the other way
round.

Padding is explicit and the same on both sides. Frameworks whose "same" padding differs between the sides when
the stride is 2 have to pad by hand, or they compute another network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeVar

from multiring.errors import UsageError
from multiring.models.nets.layers import (
    Add,
    BatchNorm,
    Conv,
    Dense,
    GlobalAveragePool,
    Layer,
    MaxPool,
    Parameter,
    Relu,
    Shape,
)

__all__ = ["DEPTHS", "INPUT", "ResNetSpec", "Stem", "resnet"]

Stem = Literal["cifar", "imagenet"]
Value = TypeVar("Value")

DEPTHS = (8, 20, 50, 101)
INPUT = "input"

# Blocks per stage of the bottleneck networks; the basic ones have (depth - 2) / 6 in each of three stages.
BOTTLENECK_BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
BOTTLENECK_EXPANSION = 4


@dataclass(frozen=True)
class ResNetSpec:
    """A residual network as a list of layers; made by `resnet`."""

    depth: int
    stem: Stem
    in_channels: int
    classes: int
    layers: tuple[Layer, ...] = field(repr=False)

    @property
    def output(self) -> str:
        """Name of the layer whose result is the class scores, shape `(classes,)` per image."""
        return self.layers[-1].name

    def parameters(self) -> tuple[Parameter, ...]:
        """All trained tensors, in the order of the layers."""
        return tuple(parameter for layer in self.layers for parameter in layer.parameters())

    def state_shapes(self) -> dict[str, Shape]:
        """Names and shapes of the running statistics of batch normalisation (not trained)."""
        return {
            f"{layer.name}.{kind}": (layer.channels,)
            for layer in self.layers
            if isinstance(layer, BatchNorm)
            for kind in ("running_mean", "running_var")
        }

    def count_parameters(self) -> int:
        """Number of trained values."""
        return sum(parameter.size for parameter in self.parameters())

    def shapes(self, image_size: int) -> dict[str, Shape]:
        """Output shape of every layer, without the batch, for square images of `image_size` pixels.

        Raises:
            UsageError: The images are too small for the network's strides.
        """
        shapes: dict[str, Shape] = {INPUT: (self.in_channels, image_size, image_size)}
        for layer in self.layers:
            shapes[layer.name] = layer.output_shape(*(shapes[name] for name in layer.inputs))
        return shapes

    def count_flops(self, image_size: int) -> int:
        """Floating-point operations of one forward pass over one image (a multiply-add counts as two).

        Only convolutions and the dense layer are counted, as is usual; a training step costs three times
        as much.
        """
        shapes = self.shapes(image_size)
        total = 0
        for layer in self.layers:
            if isinstance(layer, Conv):
                total += 2 * math.prod(shapes[layer.name]) * layer.in_channels * layer.kernel**2
            elif isinstance(layer, Dense):
                total += 2 * layer.in_features * layer.out_features
        return total

    def run(self, images: Value, apply: Callable[..., Value]) -> Value:
        """Run the layers in order.

        Args:
            images: What the first layer reads.
            apply: Gives a layer's result: `apply(layer, *inputs)`.

        Returns:
            The result of the last layer. Every other one is let go of after its last use.
        """
        values = {INPUT: images}
        for layer, released in zip(self.layers, self._last_uses, strict=True):
            values[layer.name] = apply(layer, *(values[name] for name in layer.inputs))
            for name in released:
                del values[name]
        return values[self.output]

    @cached_property
    def _last_uses(self) -> tuple[tuple[str, ...], ...]:
        """For every layer, the results that no later layer reads."""
        last = {name: index for index, layer in enumerate(self.layers) for name in layer.inputs}
        return tuple(
            tuple(name for name, use in last.items() if use == index) for index in range(len(self.layers))
        )


def resnet(
    depth: int,
    *,
    classes: int,
    in_channels: int = 3,
    stem: Stem | None = None,
) -> ResNetSpec:
    """Specify a ResNet.

    Depths 8 and 20 have basic blocks in three stages of 16, 32 and 64 channels; depths 50 and 101 have
    bottleneck blocks with the stride in the 3x3 convolution ("v1.5") in four stages. A shortcut that changes
    the shape is a 1x1 convolution with batch normalisation.

    Args:
        depth: One of `DEPTHS`.
        classes: Number of class scores, at least 1.
        in_channels: Channels of the images, at least 1.
        stem: "cifar" is a 3x3 convolution, "imagenet" a 7x7 one with stride 2 and a 3x3 maximum pooling with
            stride 2. Without it depths 8 and 20 get "cifar" and the others "imagenet".

    Raises:
        UsageError: An argument is out of range.
    """
    if depth not in DEPTHS:
        raise UsageError(
            f"ResNet depth {depth} is not specified; choose one of {', '.join(map(str, DEPTHS))}"
        )
    if classes < 1 or in_channels < 1:
        raise UsageError(
            f"a ResNet needs at least one class and one channel, not {classes} and {in_channels}"
        )
    bottleneck = depth in BOTTLENECK_BLOCKS
    chosen: Stem = stem or ("imagenet" if bottleneck else "cifar")
    if chosen not in ("cifar", "imagenet"):
        raise UsageError(f"unknown stem {chosen!r}; choose cifar or imagenet")
    builder = _Builder(in_channels)
    builder.stem(chosen, 64 if bottleneck else 16)
    blocks = BOTTLENECK_BLOCKS[depth] if bottleneck else ((depth - 2) // 6,) * 3
    for stage, count in enumerate(blocks):
        width = (64 if bottleneck else 16) * 2**stage
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            builder.block(f"stage{stage + 1}.block{block + 1}", width, stride, bottleneck)
    builder.head(classes)
    return ResNetSpec(depth, chosen, in_channels, classes, tuple(builder.layers))


class _Builder:
    """Appends layers to a list, keeping track of what the last one gives."""

    def __init__(self, in_channels: int) -> None:
        self.layers: list[Layer] = []
        self.last = INPUT
        self.channels = in_channels

    def _add(self, layer: Layer) -> None:
        self.layers.append(layer)
        self.last = layer.name

    def _conv_bn(
        self, prefix: str, suffix: str, channels: int, kernel: int, stride: int, *, closes: bool = False
    ) -> None:
        conv = f"{prefix}.conv{suffix}"
        self._add(Conv(conv, (self.last,), kernel, stride, kernel // 2, self.channels, channels))
        self._add(BatchNorm(f"{prefix}.bn{suffix}", (conv,), channels, closes_block=closes))
        self.channels = channels

    def stem(self, stem: Stem, channels: int) -> None:
        kernel, stride = (3, 1) if stem == "cifar" else (7, 2)
        self._conv_bn("stem", "", channels, kernel, stride)
        self._add(Relu("stem.relu", (self.last,)))
        if stem == "imagenet":
            self._add(MaxPool("stem.pool", (self.last,), kernel=3, stride=2, padding=1))

    def block(self, name: str, width: int, stride: int, bottleneck: bool) -> None:
        entry, entry_channels = self.last, self.channels
        steps = [(1, 1), (3, stride), (1, 1)] if bottleneck else [(3, stride), (3, 1)]
        out_channels = width * (BOTTLENECK_EXPANSION if bottleneck else 1)
        for index, (kernel, step) in enumerate(steps, start=1):
            closes = index == len(steps)
            channels = out_channels if closes else width
            self._conv_bn(name, str(index), channels, kernel, step, closes=closes)
            if not closes:
                self._add(Relu(f"{name}.relu{index}", (self.last,)))
        branch, shortcut = self.last, entry
        if stride != 1 or entry_channels != out_channels:
            self.last, self.channels = entry, entry_channels
            self._conv_bn(f"{name}.shortcut", "", out_channels, 1, stride)
            shortcut = self.last
        self._add(Add(f"{name}.add", (branch, shortcut)))
        self._add(Relu(f"{name}.relu", (self.last,)))

    def head(self, classes: int) -> None:
        self._add(GlobalAveragePool("head.pool", (self.last,)))
        self._add(Dense("head.dense", (self.last,), self.channels, classes))
