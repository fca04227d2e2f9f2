"""Blobs: values and their gradient, as NumPy arrays for the user and tensors for the layers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from multiring.errors import UsageError
from multiring.models.caffe.device import CPU, Memory

__all__ = ["Blob", "Shape", "decimal"]

Array = npt.NDArray[Any]
Shape = tuple[int, ...]


class Blob:
    """Values and gradient of equal shape, allocated when they are first used.

    The arrays of a learned blob stay where they are. A layer gives its results in new memory instead, so
    take `net.blobs[name].data` anew after each pass. Of a net that computes on a GPU take every array anew:
    those on the host are copied from there when they are taken, and back when a layer runs next.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device = CPU) -> None:
        self._shape, self.dtype, self.device = tuple(shape), dtype, device
        self._data: Memory | None = None
        self._diff: Memory | None = None

    @property
    def data(self) -> Array:
        """The values: a writable view, or a copy of those on a GPU that is written back."""
        return self._shaped_array(self._values())

    @property
    def diff(self) -> Array:
        """The gradient, likewise."""
        return self._shaped_array(self._gradient())

    @property
    def gpu_data_ptr(self) -> int:
        """Address of the values where they are computed, as builds of pycaffe for GPUs have it."""
        return self.tensor.data_ptr()

    @property
    def gpu_diff_ptr(self) -> int:
        """Address of the gradient, likewise."""
        return self.gradient.data_ptr()

    @property
    def shape(self) -> Shape:
        """Length of each axis."""
        return self._shape

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self._shape)

    @property
    def num(self) -> int:
        """Length of the first of four axes."""
        return self._legacy(0)

    @property
    def channels(self) -> int:
        """Length of the second of four axes."""
        return self._legacy(1)

    @property
    def height(self) -> int:
        """Length of the third of four axes."""
        return self._legacy(2)

    @property
    def width(self) -> int:
        """Length of the last of four axes."""
        return self._legacy(3)

    def reshape(self, *shape: int) -> None:
        """Change the shape; contents are lost if it is another one."""
        if tuple(shape) != self._shape:
            self._shape, self._data, self._diff = tuple(int(extent) for extent in shape), None, None

    @property
    def tensor(self) -> torch.Tensor:
        """The values, on the device."""
        return self._shaped(self._values().tensor)

    @tensor.setter
    def tensor(self, value: torch.Tensor) -> None:
        if tuple(value.shape) != self._shape:
            self.reshape(*value.shape)
        self._data = Memory(value)

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient, on the device."""
        return self._shaped(self._gradient().tensor)

    @gradient.setter
    def gradient(self, value: torch.Tensor) -> None:
        self._diff = Memory(value)

    @property
    def has_gradient(self) -> bool:
        """Whether there is a gradient, if only zeros that were asked for."""
        return self._diff is not None

    def share(self, owner: Blob, *, gradient: bool = True) -> None:
        """Have the memory of another blob with as many elements."""
        if owner.count != self.count:
            raise UsageError(f"blobs of shape {self.shape} and {owner.shape} cannot share memory")
        self._data = owner._values()
        if gradient:
            self._diff = owner._gradient()

    def become(self, other: Blob) -> None:
        """Have another blob's values, and their memory: the layer between the two does nothing to them."""
        self.reshape(*other._shape)
        self._data = other._data

    def become_gradient(self, other: Blob) -> None:
        """The same of the gradients."""
        self._diff = other._diff

    def send(self) -> None:
        """Has layers that have kept the tensors see what the program has written on the host."""
        for memory in (self._data, self._diff):
            if memory is not None:
                _ = memory.tensor

    def like(self) -> Blob:
        """Another one of this shape, dtype and device."""
        return Blob(self._shape, self.dtype, self.device)

    def clear_gradient(self) -> None:
        """Set the gradient to zeros."""
        if self._diff is not None:
            self._diff.tensor.zero_()

    def _shaped(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of memory that is shared over shapes."""
        is_other = tensor.shape != self._shape and tensor.numel() == self.count
        return tensor.view(self._shape) if is_other else tensor

    def _shaped_array(self, memory: Memory) -> Array:
        array = memory.array
        if array.shape != self._shape and array.size == self.count:
            array = array.view()
            array.shape = self._shape  # raises rather than copies
        return array

    def _values(self) -> Memory:
        if self._data is None:
            self._data = self._zeros()
        return self._data

    def _gradient(self) -> Memory:
        if self._diff is None:
            self._diff = self._zeros()
        return self._diff

    def _zeros(self) -> Memory:
        return Memory(torch.zeros(self._shape, dtype=self.dtype, device=self.device))

    def _legacy(self, axis: int) -> int:
        return self._shape[axis] if axis < len(self._shape) else 1


def decimal(value: float) -> float:
    """The number as it is written in a prototxt.

    Protobuf keeps `0.1` as the float32 next to it; in float64 that would be another learning rate.
    """
    return float(str(np.float32(value)))
