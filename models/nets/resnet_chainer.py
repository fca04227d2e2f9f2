"""The ResNet specification built in Chainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import multiring.chainer  # isort: skip  # noqa: F401  # before chainer, which it makes importable

import chainer
import numpy as np
import numpy.typing as npt
from chainer import functions, links

from multiring.models.nets import layers
from multiring.models.nets.convolution_chainer import Convolution
from multiring.models.nets.resnet_spec import ResNetSpec
from multiring.models.nets.weights import check_weights

__all__ = ["ChainerResNet", "load_weights", "read_weights", "running_statistics", "trained_parameters"]

Array = npt.NDArray[Any]

# What the specification's names are in Chainer.
NAMES = {"weight": "W", "bias": "b"}
BATCH_NORM_NAMES = {
    "weight": "gamma",
    "bias": "beta",
    "running_mean": "avg_mean",
    "running_var": "avg_var",
}


class ChainerResNet(chainer.Chain):
    """A network that runs the layers of a specification in order.

    Links bear the names of the specification (`/stage1/block1/conv1`), their parameters and running
    statistics those of Chainer. It trains or evaluates as `chainer.config.train` says.

    Args:
        spec: The network.
        dtype: Floating-point type of the parameters and of the images.
    """

    def __init__(self, spec: ResNetSpec, dtype: npt.DTypeLike = np.float32) -> None:
        super().__init__()
        self.spec = spec
        # Links take their dtype from here; that of an array given as initial value is ignored.
        with chainer.using_config("dtype", np.dtype(dtype)):
            for layer in spec.layers:
                if (link := _link(layer)) is not None:
                    _attach(self, layer.name, link)

    def forward(self, images: chainer.Variable | Array) -> chainer.Variable:
        """Class scores `(batch, classes)` of images `(batch, channels, height, width)`."""
        return self.spec.run(images, self._apply)

    def _apply(self, layer: layers.Layer, x: Any, shortcut: Any = None) -> Any:
        match layer:
            case layers.Relu():
                return functions.relu(x)
            case layers.MaxPool():
                sliding = {"stride": layer.stride, "pad": layer.padding}
                return functions.max_pooling_2d(x, layer.kernel, **sliding, cover_all=False)
            case layers.Add():
                return x + shortcut
            case layers.GlobalAveragePool():
                return functions.mean(x, axis=(2, 3))
            case _:
                # Looked up each time, since a conversion of the batch normalisation replaces links.
                return _find(self, layer.name)(x)


class _Conv(links.Convolution2D):
    def __init__(self, layer: layers.Conv) -> None:
        super().__init__(
            *(layer.in_channels, layer.out_channels, layer.kernel, layer.stride, layer.padding),
            nobias=True,
            initialW=0,  # weights are loaded; this draws no random numbers
        )

    def forward(self, x: Any) -> Any:
        return Convolution(self.stride[0], self.pad[0]).apply((x, self.W))[0]


def _link(layer: layers.Layer) -> chainer.Link | None:
    match layer:
        case layers.Conv():
            return _Conv(layer)
        case layers.BatchNorm():
            return links.BatchNormalization(layer.channels, decay=1 - layer.momentum, eps=layer.eps)
        case layers.Dense():
            return links.Linear(layer.in_features, layer.out_features, initialW=0)
        case _:
            return None


def _attach(root: chainer.Chain, path: str, link: chainer.Link) -> None:
    *parents, leaf = path.split(".")
    for name in parents:
        if name not in root._children:
            root.add_link(name, chainer.Chain())
        root = root[name]
    root.add_link(leaf, link)


def _named_arrays(model: ChainerResNet) -> dict[str, Array]:
    arrays = {name: parameter.array for name, parameter in trained_parameters(model).items()}
    return arrays | dict(zip(model.spec.state_shapes(), running_statistics(model), strict=True))


def _find(model: ChainerResNet, path: str) -> chainer.Link:
    link: chainer.Link = model
    for name in path.split("."):
        link = link[name]
    return link


def _find_attribute(model: ChainerResNet, name: str) -> Any:
    path, _, leaf = name.rpartition(".")
    link = _find(model, path)
    return getattr(link, (BATCH_NORM_NAMES if isinstance(link, links.BatchNormalization) else NAMES)[leaf])


def trained_parameters(model: ChainerResNet) -> dict[str, chainer.Parameter]:
    """The parameters by the specification's names, in its order."""
    return {parameter.name: _find_attribute(model, parameter.name) for parameter in model.spec.parameters()}


def running_statistics(model: ChainerResNet) -> list[Array]:
    """The arrays of the running statistics themselves, in the specification's order."""
    return [_find_attribute(model, name) for name in model.spec.state_shapes()]


def load_weights(model: ChainerResNet, weights: Mapping[str, Array]) -> None:
    """Copy weights by name, converting to the network's dtype; raises UsageError before anything is copied if
    they do not fit."""
    check_weights(model.spec, weights)
    for name, array in _named_arrays(model).items():
        array[...] = weights[name]


def read_weights(model: ChainerResNet) -> dict[str, Array]:
    """Copies of all parameters and running statistics by name, as `load_weights` takes them."""
    return {name: array.copy() for name, array in _named_arrays(model).items()}
