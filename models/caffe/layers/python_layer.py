"""Layers that a program writes in Python, as classes that have what they have in pycaffe.

class Scale(caffe.Layer):
    def setup(self, bottom, top):
        self.factor = float(self.param_str)

    def reshape(self, bottom, top):
        top[0].reshape(*bottom[0].shape)

    def forward(self, bottom, top):
        top[0].data[...] = self.factor * bottom[0].data

    def backward(self, top, propagate_down, bottom):
        bottom[0].diff[...] = self.factor * top[0].diff
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from multiring.models.caffe.blob import Blob, Shape
from multiring.models.caffe.layer import Gradients, Layer, Tensors, register

__all__ = ["BlobVec", "PythonLayer"]

_MANY = 1 << 20


class BlobVec(list[Blob]):
    """The learned blobs of a layer that is written in Python."""

    def __init__(self, owner: Layer) -> None:
        super().__init__()
        self._owner = owner

    def add_blob(self, *shape: int) -> Blob:
        """Append a blob of zeros, and return it."""
        blob = Blob(tuple(shape), self._owner.context.dtype, self._owner.context.device)
        self.append(blob)
        return blob


class PythonLayer:
    """The base of layers that a program writes; `caffe.Layer`.

    Attributes:
        param_str: What `python_param` says.
        phase: `TRAIN` or `TEST`.
        blobs: Learned blobs; `self.blobs.add_blob(3, 4)` in `setup` adds one.
    """

    param_str: str
    phase: int
    blobs: BlobVec

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """Called once, before all others."""

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """Gives the tops their shapes: `top[0].reshape(*bottom[0].shape)`."""

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """Fills `top[k].data`."""
        raise NotImplementedError(f"{type(self).__name__} has no forward(self, bottom, top)")

    def backward(self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]) -> None:
        """Fills `bottom[k].diff` where `propagate_down[k]`, and adds to the `diff` of the learned blobs."""
        raise NotImplementedError(f"{type(self).__name__} has no backward(self, top, propagate_down, bottom)")


@register("Python")
class Python(Layer):
    """Runs a layer of the program."""

    bottoms = (0, _MANY)
    tops = (0, _MANY)

    def setup(self, bottoms: Sequence[Shape]) -> None:
        param = self.param.python_param
        if not param.module or not param.layer:
            raise self.error("module and layer are missing", "python_param")
        try:
            module = importlib.import_module(param.module)
        except ModuleNotFoundError as error:
            raise self.error(
                f"{error}: its folder has to be in PYTHONPATH", "python_param", "module"
            ) from error
        kind: Any = getattr(module, param.layer, None)
        if not isinstance(kind, type):
            raise self.error(f"{module.__file__} has no class {param.layer}", "python_param", "layer")
        self.blobs = blobs = BlobVec(self)
        self._own: Any = object.__new__(kind)
        own: Any = self._own
        own.param_str, own.phase, own.blobs = param.param_str, self.context.phase, blobs
        own.__init__()
        self._bottom = [Blob(shape, self.context.dtype, self.context.device) for shape in bottoms]
        self._top = [Blob((), self.context.dtype, self.context.device) for _ in self.param.top]
        own.setup(self._bottom, self._top)

    def infer(self, bottoms: Sequence[Shape]) -> list[Shape]:
        for blob, shape in zip(self._bottom, bottoms, strict=True):
            blob.reshape(*shape)
        self._own.reshape(self._bottom, self._top)
        return [blob.shape for blob in self._top]

    def forward(self, bottoms: Tensors) -> list[torch.Tensor]:
        if not bottoms:  # a net asks the others for their shapes before
            self._own.reshape(self._bottom, self._top)
        for blob, values in zip(self._bottom, bottoms, strict=True):
            blob.tensor = values
        self._own.forward(self._bottom, self._top)
        return [blob.tensor for blob in self._top]

    def backward(self, gradients: Gradients, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        for blob, gradient in zip(self._top, gradients, strict=True):
            blob.gradient = torch.zeros_like(blob.tensor) if gradient is None else gradient
        for blob in self._bottom:
            blob.gradient = torch.zeros_like(blob.tensor)
        self._own.backward(self._top, list(wanted), self._bottom)
        pairs = zip(self._bottom, wanted, strict=True)
        return [blob.gradient if is_wanted else None for blob, is_wanted in pairs]
