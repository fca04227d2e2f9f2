"""The ResNet specification built in Torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from multiring.models.nets import layers
from multiring.models.nets.resnet_spec import ResNetSpec
from multiring.models.nets.weights import check_weights

__all__ = ["TorchResNet", "load_weights", "read_weights"]


class TorchResNet(nn.Module):
    """A network that runs the layers of a specification in order.

    Parameters and running statistics bear the names of the specification
    (`stage1.block1.conv1.weight`), so weights are loaded by name.

    Args:
        spec: The network.
        dtype: Floating-point type of the parameters and of the images.
    """

    def __init__(self, spec: ResNetSpec, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.spec = spec
        for layer in spec.layers:
            _attach(self, layer.name, _module(layer, dtype))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Class scores `(batch, classes)` of images `(batch, channels, height, width)`."""
        # Looked up each time, since a conversion of the batch normalisation replaces modules.
        return self.spec.run(images, lambda layer, *inputs: self.get_submodule(layer.name)(*inputs))


class _Sum(nn.Module):
    def forward(self, branch: torch.Tensor, shortcut: torch.Tensor) -> torch.Tensor:
        return branch + shortcut


class _SpatialMean(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value.mean(dim=(2, 3))


def _module(layer: layers.Layer, dtype: torch.dtype) -> nn.Module:
    match layer:
        case layers.Conv(kernel=kernel, stride=stride, padding=padding):
            channels = layer.in_channels, layer.out_channels
            return nn.Conv2d(*channels, kernel, stride=stride, padding=padding, bias=False, dtype=dtype)
        case layers.BatchNorm():
            return nn.BatchNorm2d(layer.channels, eps=layer.eps, momentum=layer.momentum, dtype=dtype)
        case layers.Relu():
            return nn.ReLU()
        case layers.MaxPool():
            return nn.MaxPool2d(layer.kernel, stride=layer.stride, padding=layer.padding)
        case layers.Add():
            return _Sum()
        case layers.GlobalAveragePool():
            return _SpatialMean()
        case layers.Dense():
            return nn.Linear(layer.in_features, layer.out_features, dtype=dtype)


def _attach(root: nn.Module, path: str, module: nn.Module) -> None:
    *parents, leaf = path.split(".")
    for name in parents:
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    root.add_module(leaf, module)


def _named_tensors(model: TorchResNet) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = [parameter.name for parameter in model.spec.parameters()] + list(model.spec.state_shapes())
    return {name: tensors[name] for name in names}


def load_weights(model: TorchResNet, weights: Mapping[str, npt.NDArray[Any]]) -> None:
    """Copy weights by name, converting to the network's dtype; raises UsageError before anything is copied if
    they do not fit."""
    check_weights(model.spec, weights)
    with torch.no_grad():
        for name, tensor in _named_tensors(model).items():
            tensor.copy_(torch.from_numpy(np.ascontiguousarray(weights[name])))


def read_weights(model: TorchResNet) -> dict[str, npt.NDArray[Any]]:
    """Copies of all parameters and running statistics by name, as `load_weights` takes them."""
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in _named_tensors(model).items()}
