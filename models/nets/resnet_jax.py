"""The ResNet specification built in JAX: a pure function of parameters and running statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from multiring.jax import BatchStatistics
from multiring.models.nets import layers
from multiring.models.nets.resnet_spec import ResNetSpec
from multiring.models.nets.weights import check_weights, to_channels_first, to_channels_last

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
    running = dict(running)

    def apply(layer: layers.Layer, *inputs: jax.Array) -> jax.Array:
        x = inputs[0]
        match layer:
            case layers.Conv(padding=padding):
                # Explicit, since "SAME" pads unevenly where the stride is 2.
                weight, steps = parameters[f"{layer.name}.weight"], (layer.stride, layer.stride)
                return lax.conv_general_dilated(
                    x, weight, steps, [(padding, padding)] * 2, dimension_numbers=CHANNELS_LAST
                )
            case layers.BatchNorm():
                return _normalise(layer, parameters, running, statistics, x)
            case layers.Relu():
                return jnp.maximum(x, 0)
            case layers.MaxPool(kernel=kernel, stride=stride, padding=padding):
                edges = [(0, 0), (padding, padding), (padding, padding), (0, 0)]
                window = (1, kernel, kernel, 1), (1, stride, stride, 1), edges
                largest: jax.Array = lax.reduce_window(x, -jnp.inf, lax.max, *window)
                return largest
            case layers.Add():
                return x + inputs[1]
            case layers.GlobalAveragePool():
                return x.mean((1, 2))
            case layers.Dense():
                return x @ parameters[f"{layer.name}.weight"] + parameters[f"{layer.name}.bias"]

    return spec.run(images.transpose(0, 2, 3, 1), apply), running


def _normalise(
    layer: layers.BatchNorm, parameters: Arrays, running: Arrays, statistics: Statistics | None, x: jax.Array
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
    return {name: to_channels_first(np.asarray(value)) for name, value in arrays.items()}
