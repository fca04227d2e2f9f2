"""The ResNet specification built in JAX: a pure function of parameters and running statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from multiring.errors import UsageError
from multiring.jax import BatchStatistics
from multiring.models.nets.resnet_spec import (
    INPUT,
    Add,
    BatchNorm,
    Conv,
    Dense,
    GlobalAveragePool,
    Layer,
    MaxPool,
    Relu,
    ResNetSpec,
)
from multiring.models.nets.weights import check_weights, to_channels_last

__all__ = ["Arrays", "apply_resnet", "load_weights", "local_statistics", "read_weights"]

Arrays = dict[str, jax.Array]
Statistics = Callable[[jax.Array, str], BatchStatistics]

CHANNELS_LAST = ("NHWC", "HWIO", "NHWC")


def local_statistics(x: jax.Array, mask: jax.Array) -> BatchStatistics:
    """Mean and biased variance of this rank's batch, per channel.

    Args:
        x: Array `(batch, h, w, channels)`.
        mask: Samples that count, shape (batch,).
    """
    count = (mask.sum() * (x.shape[1] * x.shape[2])).astype(x.dtype)
    rows = mask[:, None, None, None]
    mean = jnp.where(rows, x, 0).sum((0, 1, 2)) / jnp.maximum(count, 1)
    squares = jnp.where(rows, jnp.square(x - mean), 0).sum((0, 1, 2))
    return BatchStatistics(mean, squares / jnp.maximum(count, 1), count)


def apply_resnet(
    spec: ResNetSpec,
    parameters: Arrays,
    running: Arrays,
    images: jax.Array,
    statistics: Statistics | None = None,
) -> tuple[jax.Array, Arrays]:
    """Run the network.

    Args:
        spec: The network.
        parameters: Arrays by the names of the specification, channels last.
        running: Running means and variances, by name.
        images: `(batch, channels, height, width)`.
        statistics: In training, what gives mean and variance of a batch normalisation's input; without it the
            running ones are used.

    Returns:
        Class scores `(batch, classes)`, and the running statistics afterwards.
    """
    values = {INPUT: images.transpose(0, 2, 3, 1)}
    running = dict(running)
    for layer, released in zip(spec.layers, spec.last_uses(), strict=True):
        inputs = [values[name] for name in layer.inputs]
        values[layer.name] = _run(layer, parameters, running, statistics, *inputs)
        for name in released:
            del values[name]
    return values[spec.output], running


def _run(
    layer: Layer, parameters: Arrays, running: Arrays, statistics: Statistics | None, *inputs: jax.Array
) -> jax.Array:
    # One branch per kind of layer: the table of what each becomes in JAX.
    x = inputs[0]
    if isinstance(layer, Conv):
        # Explicit, since "SAME" pads unevenly where the stride is 2.
        padding = [(layer.padding, layer.padding)] * 2
        strides = (layer.stride, layer.stride)
        weight = parameters[f"{layer.name}.weight"]
        return lax.conv_general_dilated(x, weight, strides, padding, dimension_numbers=CHANNELS_LAST)
    if isinstance(layer, BatchNorm):
        return _normalise(layer, parameters, running, statistics, x)
    if isinstance(layer, Relu):
        return jnp.maximum(x, 0)
    if isinstance(layer, MaxPool):
        window, steps = (1, layer.kernel, layer.kernel, 1), (1, layer.stride, layer.stride, 1)
        edges = [(0, 0), (layer.padding, layer.padding), (layer.padding, layer.padding), (0, 0)]
        largest: jax.Array = lax.reduce_window(x, -jnp.inf, lax.max, window, steps, edges)
        return largest
    if isinstance(layer, Add):
        return x + inputs[1]
    if isinstance(layer, GlobalAveragePool):
        return x.mean((1, 2))
    if isinstance(layer, Dense):
        return x @ parameters[f"{layer.name}.weight"] + parameters[f"{layer.name}.bias"]
    raise UsageError(f"layer {layer.name} is of a kind that the JAX network does not know")


def _normalise(
    layer: BatchNorm, parameters: Arrays, running: Arrays, statistics: Statistics | None, x: jax.Array
) -> jax.Array:
    mean_name, variance_name = f"{layer.name}.running_mean", f"{layer.name}.running_var"
    if statistics is None:
        mean, variance = running[mean_name], running[variance_name]
    else:
        found = statistics(x, layer.name)
        mean, variance = found.mean, found.variance
        for name, new in ((mean_name, mean), (variance_name, found.unbiased_variance)):
            moved = (1 - layer.momentum) * running[name] + layer.momentum * lax.stop_gradient(new)
            running[name] = jnp.where(found.samples > 0, moved, running[name])
    factor = lax.rsqrt(variance + layer.eps) * parameters[f"{layer.name}.weight"]
    return (x - mean) * factor + parameters[f"{layer.name}.bias"]


def load_weights(
    spec: ResNetSpec, weights: Mapping[str, npt.NDArray[Any]], dtype: np.dtype[Any]
) -> tuple[Arrays, Arrays]:
    """Parameters and running statistics of weights in the specification's layout.

    Args:
        spec: The network.
        weights: All parameters and running statistics, channels first.
        dtype: Floating-point type of the result.

    Raises:
        UsageError: A name is missing, unknown, or its shape differs.
    """
    check_weights(spec, weights)
    parameters = {p.name: jnp.array(to_channels_last(weights[p.name]), dtype) for p in spec.parameters()}
    return parameters, {name: jnp.array(weights[name], dtype) for name in spec.state_shapes()}


def read_weights(arrays: Mapping[str, jax.Array]) -> dict[str, npt.NDArray[Any]]:
    """Copies in the specification's layout, by name."""
    return {name: _channels_first(np.asarray(value)) for name, value in arrays.items()}


def _channels_first(value: npt.NDArray[Any]) -> npt.NDArray[Any]:
    axes = (3, 2, 0, 1) if value.ndim == 4 else tuple(reversed(range(value.ndim)))
    return np.array(value.transpose(axes), order="C")
