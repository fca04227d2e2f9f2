"""The ResNet specification built in TensorFlow: images and weights with channels last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

import multiring.tensorflow
from multiring import Communicator
from multiring.models.nets import layers
from multiring.models.nets.resnet_spec import ResNetSpec
from multiring.models.nets.weights import check_weights, to_channels_first, to_channels_last

__all__ = ["TensorFlowResNet", "load_weights", "read_weights"]

Array = npt.NDArray[Any]
Tensor = Any


class TensorFlowResNet(tf.Module):
    """A network that runs the layers of a specification in order.

    Args:
        spec: The network.
        dtype: Floating-point type of the parameters and of the images.
        comm: Ranks whose batches are normalised together; None for each rank by itself.

    Attributes:
        parameters: Trained variables by the names of the specification.
        statistics: Running statistics by name.
    """

    def __init__(
        self, spec: ResNetSpec, dtype: tf.DType = tf.float32, comm: Communicator | None = None
    ) -> None:
        super().__init__(name="resnet")
        self.spec = spec
        self._comm = comm
        self.parameters = {
            parameter.name: tf.Variable(
                tf.zeros(to_channels_last(np.empty(parameter.shape)).shape, dtype), name=parameter.name
            )
            for parameter in spec.parameters()
        }
        self.statistics = {
            name: tf.Variable(tf.zeros(shape, dtype), trainable=False, name=name)
            for name, shape in spec.state_shapes().items()
        }

    def __call__(self, images: Tensor, *, training: bool) -> Tensor:
        """Class scores `(batch, classes)` of images `(batch, channels, height, width)`."""

        def apply(layer: layers.Layer, x: Tensor, shortcut: Tensor = None) -> Tensor:
            match layer:
                case layers.Conv():
                    return _convolve(layer, x, self.parameters[f"{layer.name}.weight"])
                case layers.BatchNorm():
                    return self._normalise(layer, x, training)
                case layers.Relu():
                    return tf.nn.relu(x)
                case layers.MaxPool():
                    padded = tf.pad(x, _pads(layer), constant_values=x.dtype.min)
                    return tf.nn.max_pool2d(padded, layer.kernel, layer.stride, "VALID")
                case layers.Add():
                    return x + shortcut
                case layers.GlobalAveragePool():
                    return tf.reduce_mean(x, (1, 2))
                case layers.Dense():
                    return x @ self.parameters[f"{layer.name}.weight"] + self.parameters[f"{layer.name}.bias"]

        return self.spec.run(tf.transpose(images, (0, 2, 3, 1)), apply)

    def _normalise(self, layer: layers.BatchNorm, x: Tensor, training: bool) -> Tensor:
        scale, offset = self.parameters[f"{layer.name}.weight"], self.parameters[f"{layer.name}.bias"]
        running_mean = self.statistics[f"{layer.name}.running_mean"]
        running_var = self.statistics[f"{layer.name}.running_var"]
        if not training:
            return tf.nn.batch_normalization(x, running_mean, running_var, offset, scale, layer.eps)
        if self._comm is None:
            mean, variance = tf.nn.moments(x, (0, 1, 2))
            y = tf.nn.batch_normalization(x, mean, variance, offset, scale, layer.eps)
            count = tf.cast(tf.reduce_prod(tf.shape(x)[:3]), x.dtype)
        else:
            y, mean, variance, count = multiring.tensorflow.sync_batch_norm(
                x, scale, offset, epsilon=layer.eps, name=layer.name, comm=self._comm
            )
        unbiased = variance * (count / tf.maximum(count - 1, 1))
        for running, value in ((running_mean, mean), (running_var, unbiased)):
            running.assign((1 - layer.momentum) * running + layer.momentum * tf.cast(value, running.dtype))
        return y


def _convolve(layer: layers.Conv, x: Tensor, weight: Tensor) -> Tensor:
    if x.shape[0] == 0:
        # In float32 TensorFlow gives the result of an empty batch as many channels as the input has. Nothing
        # is to be computed, but gradients, of zeros, have to reach what came before: its backward pass
        # communicates.
        height, width = map(layer.output_extent, x.shape[1:3])
        nothing = 0.0 * (tf.reduce_sum(x) + tf.reduce_sum(weight))
        return tf.zeros((0, height, width, layer.out_channels), x.dtype) + nothing
    # "SAME" would pad the far side alone where the stride is 2.
    return tf.nn.conv2d(x, weight, layer.stride, _pads(layer))


def _pads(layer: layers.Conv | layers.MaxPool) -> list[list[int]]:
    return [[0, 0], [layer.padding] * 2, [layer.padding] * 2, [0, 0]]


def _named(model: TensorFlowResNet) -> dict[str, Any]:
    return {**model.parameters, **model.statistics}


def load_weights(model: TensorFlowResNet, weights: Mapping[str, Array]) -> None:
    """Copy weights by name, converting to the network's dtype and layout; raises UsageError before anything
    is copied if they do not fit."""
    check_weights(model.spec, weights)
    for name, variable in _named(model).items():
        variable.assign(tf.cast(to_channels_last(weights[name]), variable.dtype))


def read_weights(model: TensorFlowResNet) -> dict[str, Array]:
    """Copies of all parameters and running statistics by name, as `load_weights` takes them."""
    return {name: to_channels_first(variable.numpy()) for name, variable in _named(model).items()}
