"""The ResNet specification built in PyTensor, from what PyTensor has.

PyTensor has no convolution for networks: a convolution is a matrix of all patches (im2col) times the weights.
Images are kept channels last, `(n, height, width, channels)`, so that both factors and the product are
contiguous matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytensor
import pytensor.tensor as pt

from multiring.models.nets import layers
from multiring.models.nets.patches_pytensor import max_of_patches, patches
from multiring.models.nets.resnet_spec import ResNetSpec
from multiring.models.nets.weights import check_weights, to_channels_last

__all__ = ["PyTensorResNet"]

Array = npt.NDArray[Any]
Variable: TypeAlias = Any  # a symbolic tensor; PyTensor's own types say nothing of use here
# Sums a symbolic vector over ranks; the second argument is a name that occurs once in the graph.
ReduceSum = Callable[[Variable, str], Variable]


class PyTensorResNet:
    """A network as shared variables, and graphs that apply it.

    Args:
        spec: The network.
        weights: All parameters and running statistics, as `initial_weights` returns them.
        dtype: "float32" or "float64".
        reduce_sum: Sums over ranks, for normalisation over the global batch; None normalises over the batch
            of this rank.

    Attributes:
        parameters: Shared variables of the parameters, by the names of the specification; weights of
            convolutions are matrices `(kernel * kernel * in, out)`.
        statistics: Shared variables of the running statistics, by name.
    """

    def __init__(
        self,
        spec: ResNetSpec,
        weights: Mapping[str, Array],
        dtype: str,
        reduce_sum: ReduceSum | None = None,
    ) -> None:
        self.spec = spec
        self._dtype, self._reduce_sum = dtype, reduce_sum
        self._specified = {parameter.name: parameter for parameter in spec.parameters()}
        self.parameters = {name: self._share(name, weights[name]) for name in self._specified}
        self.statistics = {name: self._share(name, weights[name]) for name in spec.state_shapes()}

    def scores(self, images: Variable, *, training: bool) -> tuple[Variable, dict[str, Variable]]:
        """Apply the network.

        Args:
            images: Symbolic images `(n, height, width, channels)`; `n` may be 0.
            training: Whether to normalise with the batch's statistics instead of the running ones.

        Returns:
            Class scores `(n, classes)`, and in training the new values of the running statistics by name.
        """
        moved: dict[str, Variable] = {}

        def apply(layer: layers.Layer, x: Variable, shortcut: Variable = None) -> Variable:
            match layer:
                case layers.Conv():
                    matrix, shape = patches(x, layer.kernel, layer.stride, layer.padding)
                    product = pt.dot(matrix, self.parameters[f"{layer.name}.weight"])
                    return product.reshape((shape[0], shape[1], shape[2], layer.out_channels))
                case layers.BatchNorm():
                    if training:
                        return self._normalise(layer, x, moved)
                    mean = self.statistics[f"{layer.name}.running_mean"]
                    return self._scale(layer, x - mean, self.statistics[f"{layer.name}.running_var"])
                case layers.Relu():
                    return pt.maximum(x, 0)
                case layers.MaxPool():
                    return max_of_patches(x, layer.kernel, layer.stride, layer.padding)
                case layers.Add():
                    return x + shortcut
                case layers.GlobalAveragePool():
                    return x.mean(axis=(1, 2))
                case layers.Dense():
                    return (
                        pt.dot(x, self.parameters[f"{layer.name}.weight"])
                        + self.parameters[f"{layer.name}.bias"]
                    )

        return self.spec.run(images, apply), moved

    def decays(self, name: str) -> bool:
        """Whether weight decay applies to a parameter."""
        return self._specified[name].decays

    def read(self) -> dict[str, Array]:
        """Copies of all parameters and running statistics, in the shapes of the specification."""
        named = {**self.parameters, **self.statistics}
        return {name: self.to_specified(name, value.get_value()) for name, value in named.items()}

    def load(self, weights: Mapping[str, Array]) -> None:
        """Take over weights by name.

        Raises:
            UsageError: A name is missing, unknown, or its shape differs; nothing was taken over.
        """
        check_weights(self.spec, weights)
        for name, value in {**self.parameters, **self.statistics}.items():
            value.set_value(self._to_matrix(name, weights[name]))

    def to_specified(self, name: str, value: Array) -> Array:
        """A copy of an array in the layout of the variable `name` (its value, gradient or momentum) in the
        shape that the specification has."""
        parameter: layers.Parameter | None = self._specified.get(name)
        if parameter is None or parameter.kind not in ("conv", "dense"):
            return np.array(value)
        if parameter.kind == "dense":
            return np.ascontiguousarray(value.T)
        out, channels, kernel, _ = parameter.shape
        return np.ascontiguousarray(value.reshape(kernel, kernel, channels, out).transpose(3, 2, 0, 1))

    def from_specified(self, name: str, value: Array) -> Array:
        """The reverse of `to_specified`."""
        return self._to_matrix(name, value)

    def _share(self, name: str, value: Array) -> Variable:
        return pytensor.shared(self._to_matrix(name, value), name=name, borrow=True)

    def _to_matrix(self, name: str, value: Array) -> Array:
        parameter = self._specified.get(name)
        if parameter is not None and parameter.kind in ("conv", "dense"):
            value = to_channels_last(value).reshape(-1, parameter.shape[0])
        return np.array(value, dtype=self._dtype, order="C")

    def _scale(self, layer: layers.BatchNorm, centred: Variable, variance: Variable) -> Variable:
        weight, bias = (self.parameters[f"{layer.name}.{kind}"] for kind in ("weight", "bias"))
        return centred * (weight / pt.sqrt(variance + np.dtype(self._dtype).type(layer.eps))) + bias

    def _normalise(self, layer: layers.BatchNorm, value: Variable, moved: dict[str, Variable]) -> Variable:
        """Normalise with the statistics of the batch; deviations are taken from the true mean, so that a
        large mean costs no digits."""
        one = np.dtype(self._dtype).type(1)
        count = pt.cast(value.shape[0] * value.shape[1] * value.shape[2], self._dtype)
        total = value.sum(axis=(0, 1, 2))
        if self._reduce_sum is not None:
            joined = self._reduce_sum(pt.concatenate([count[None], total]), f"{layer.name}: mean")
            count, total = pytensor.gradient.zero_grad(joined[0]), joined[1:]
        # A rank without samples has sums of 0 over 0 samples.
        mean = total / pt.maximum(count, one)
        centred = value - mean
        squares = (centred * centred).sum(axis=(0, 1, 2))
        if self._reduce_sum is not None:
            squares = self._reduce_sum(squares, f"{layer.name}: variance")
        variance = squares / pt.maximum(count, one)
        unbiased = squares / pt.maximum(count - one, one)
        momentum = np.dtype(self._dtype).type(layer.momentum)
        for name, batch in (("running_mean", mean), ("running_var", unbiased)):
            running = self.statistics[f"{layer.name}.{name}"]
            new = (one - momentum) * running + momentum * batch
            moved[f"{layer.name}.{name}"] = pt.switch(count > 0, new, running)
        return self._scale(layer, centred, variance)
