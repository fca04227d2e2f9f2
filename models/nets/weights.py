"""The weights that every framework starts from, by name, and their layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from multiring.errors import UsageError
from multiring.models.nets.layers import BatchNorm
from multiring.models.nets.resnet_spec import ResNetSpec

__all__ = ["check_weights", "initial_weights", "to_channels_first", "to_channels_last"]

Array = npt.NDArray[Any]


def initial_weights(
    spec: ResNetSpec,
    seed: int,
    *,
    dtype: npt.DTypeLike = np.float32,
    zero_residual: bool = False,
) -> dict[str, Array]:
    """Draw the weights that every framework starts from.

    Convolutions are He-normal over their outputs (`sqrt(2 / (out * kernel^2))`), the dense layer is normal
    with `sqrt(1 / in)`, scales are 1, shifts and biases 0, running means 0, running variances 1. One
    generator draws all values in float64, in the order of the layers, and they are rounded to `dtype` at the
    end, so a float32 network starts from the rounded weights of the float64 one.

    Args:
        spec: The network.
        seed: Seed of the generator, 0 or more.
        dtype: Floating-point type of the result.
        zero_residual: Start the last scale of each residual branch at 0, so that each block starts as the
            identity; steadies training with large global batches.

    Returns:
        Arrays by name: all of `spec.parameters()`, then all of `spec.state_shapes()`.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    closing = {layer.name for layer in spec.layers if isinstance(layer, BatchNorm) and layer.closes_block}
    weights: dict[str, Array] = {}
    for parameter in spec.parameters():
        if parameter.decays:
            deviation = (
                math.sqrt(2 / (parameter.shape[0] * math.prod(parameter.shape[2:])))
                if parameter.kind == "conv"
                else math.sqrt(1 / parameter.shape[1])
            )
            value = generator.standard_normal(parameter.shape) * deviation
        elif parameter.kind == "scale":
            zero = zero_residual and parameter.name.removesuffix(".weight") in closing
            value = np.full(parameter.shape, 0.0 if zero else 1.0)
        else:
            value = np.zeros(parameter.shape)
        weights[parameter.name] = value.astype(dtype)
    for name, shape in spec.state_shapes().items():
        weights[name] = np.full(shape, 1.0 if name.endswith("running_var") else 0.0, dtype=dtype)
    return weights


def check_weights(spec: ResNetSpec, weights: Mapping[str, Array]) -> None:
    """Check that weights are those of a network: all of its parameters and running statistics.

    Raises:
        UsageError: A name is missing or unknown, or a shape differs.
    """
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters()} | spec.state_shapes()
    if missing := sorted(shapes.keys() - weights.keys()):
        raise UsageError(
            f"weights lack {len(missing)} of {len(shapes)} arrays of the network, first {missing[0]}"
        )
    if unknown := sorted(weights.keys() - shapes.keys()):
        raise UsageError(f"weights hold {len(unknown)} arrays that the network lacks, first {unknown[0]}")
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            raise UsageError(f"{name} has shape {shape} but the weights hold {weights[name].shape}")


def to_channels_last(value: Array) -> Array:
    """Convert a weight to the layout of frameworks that keep channels last.

    Args:
        value: Convolution weight `(out, in, k, k)`, dense weight `(out, in)` or a vector.

    Returns:
        A contiguous copy `(k, k, in, out)` or `(in, out)`; vectors as they are.
    """
    if value.ndim == 4:
        return np.ascontiguousarray(value.transpose(2, 3, 1, 0))
    return np.ascontiguousarray(value.T)


def to_channels_first(value: Array) -> Array:
    """The inverse of `to_channels_last`: a contiguous copy."""
    return np.array(value.transpose(3, 2, 0, 1) if value.ndim == 4 else value.T, order="C")
