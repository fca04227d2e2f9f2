"""What PyTensor lacks for networks that NumPy is to compute: patches of images as a matrix, of which
convolution and pooling are made, and stretching an array without a loop over its elements.

From images to patches and back are linear and each other's transpose, so the gradient of one is the other.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytensor.tensor as pt
from pytensor.gradient import DisconnectedType
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.tensor.basic import second

__all__ = ["max_of_patches", "patches", "stretch_by_views"]

Array = npt.NDArray[Any]
Variable: TypeAlias = Any


def patches(images: Variable, kernel: int, stride: int, padding: int) -> tuple[Variable, list[Variable]]:
    """All patches of `kernel` x `kernel` pixels, one a row.

    Args:
        images: `(n, height, width, channels)`.
        kernel: Pixels of a patch's sides.
        stride: Pixels from one patch to the next.
        padding: Zeros around the images, on every side.

    Returns:
        The matrix `(n * rows * columns, kernel * kernel * channels)`, and `[n, rows, columns]`.
    """
    shape = [images.shape[0], *(_slide(images.shape[axis], kernel, stride, padding) for axis in (1, 2))]
    if kernel == 1 and padding == 0:
        return images[:, ::stride, ::stride].reshape((-1, images.shape[3])), shape
    return Gather(kernel, stride, padding)(images), shape


def max_of_patches(images: Variable, kernel: int, stride: int, padding: int) -> Variable:
    """Maximum of every patch, per channel; padding never wins.

    Of equal values the first takes all of the gradient, as in Torch.
    """
    return MaxPool(kernel, stride, padding)(images)[0]


def _slide(extent: Any, kernel: int, stride: int, padding: int) -> Any:
    return (extent + 2 * padding - kernel) // stride + 1


class _Patchwise(Op):
    __props__ = ("kernel", "stride", "padding")

    def __init__(self, kernel: int, stride: int, padding: int) -> None:
        self.kernel, self.stride, self.padding = kernel, stride, padding

    def _extents(self, height: Any, width: Any) -> tuple[Any, Any]:
        return _slide(height, *self._props()), _slide(width, *self._props())

    def _windows(self, rows: int, columns: int) -> list[tuple[int, slice, slice]]:
        """For each pixel of a patch: its number, and which rows and columns of the padded image are there in
        all patches."""
        return [
            (
                i * self.kernel + j,
                slice(i, i + self.stride * (rows - 1) + 1, self.stride),
                slice(j, j + self.stride * (columns - 1) + 1, self.stride),
            )
            for i in range(self.kernel)
            for j in range(self.kernel)
        ]

    def _pad(self, images: Array, value: float = 0.0) -> Array:
        if self.padding == 0:
            return images
        n, height, width, channels = images.shape
        edge = self.padding
        padded = np.full((n, height + 2 * edge, width + 2 * edge, channels), value, images.dtype)
        padded[:, edge : edge + height, edge : edge + width] = images
        return padded

    def _unpad(self, padded: Array) -> Array:
        edge = self.padding
        if edge == 0:
            return padded
        return np.ascontiguousarray(padded[:, edge:-edge, edge:-edge])

    def _zeros(self, n: int, height: int, width: int, channels: int, dtype: Any) -> Array:
        edge = self.padding
        return np.zeros((n, height + 2 * edge, width + 2 * edge, channels), dtype)


class Gather(_Patchwise):
    """Images to the matrix of their patches (im2col)."""

    def make_node(self, images: Variable) -> Apply:
        images = pt.as_tensor_variable(images)
        return Apply(self, [images], [pt.matrix(dtype=images.dtype)])

    def perform(self, node: Apply, inputs: list[Array], output_storage: list[list[Any]]) -> None:
        (images,) = inputs
        n, height, width, channels = images.shape
        rows, columns = self._extents(height, width)
        padded = self._pad(images)
        matrix = np.empty((n, rows, columns, self.kernel**2, channels), images.dtype)
        for number, down, across in self._windows(rows, columns):
            matrix[:, :, :, number] = padded[:, down, across]
        output_storage[0][0] = matrix.reshape(n * rows * columns, self.kernel**2 * channels)

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[Any]) -> list[Any]:
        n, height, width, channels = shapes[0]
        rows, columns = self._extents(height, width)
        return [(n * rows * columns, self.kernel**2 * channels)]

    def pullback(self, inputs: list[Variable], outputs: list[Variable], cotangents: list[Variable]) -> Any:
        return [Scatter(*self._props())(cotangents[0], inputs[0].shape)]


class Scatter(_Patchwise):
    """The matrix of patches back to images, adding where patches overlap (col2im)."""

    def make_node(self, matrix: Variable, shape: Variable) -> Apply:
        matrix, shape = pt.as_tensor_variable(matrix), pt.as_tensor_variable(shape)
        return Apply(self, [matrix, shape], [pt.tensor4(dtype=matrix.dtype)])

    def perform(self, node: Apply, inputs: list[Array], output_storage: list[list[Any]]) -> None:
        matrix, shape = inputs
        n, height, width, channels = (int(extent) for extent in shape)
        rows, columns = self._extents(height, width)
        parts = matrix.reshape(n, rows, columns, self.kernel**2, channels)
        padded = self._zeros(n, height, width, channels, matrix.dtype)
        for number, down, across in self._windows(rows, columns):
            padded[:, down, across] += parts[:, :, :, number]
        output_storage[0][0] = self._unpad(padded)

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[Any]) -> list[Any]:
        return [tuple(node.inputs[1][axis] for axis in range(4))]

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [[True], [False]]

    def pullback(self, inputs: list[Variable], outputs: list[Variable], cotangents: list[Variable]) -> Any:
        return [Gather(*self._props())(cotangents[0]), DisconnectedType()()]


class MaxPool(_Patchwise):
    """Maximum of every patch and channel, and which pixel of the patch it was."""

    def make_node(self, images: Variable) -> Apply:
        images = pt.as_tensor_variable(images)
        return Apply(self, [images], [pt.tensor4(dtype=images.dtype), pt.tensor4(dtype="uint8")])

    def perform(self, node: Apply, inputs: list[Array], output_storage: list[list[Any]]) -> None:
        (images,) = inputs
        n, height, width, channels = images.shape
        rows, columns = self._extents(height, width)
        padded = self._pad(images, -np.inf)
        highest = np.full((n, rows, columns, channels), -np.inf, images.dtype)
        which = np.zeros((n, rows, columns, channels), np.uint8)
        for number, down, across in self._windows(rows, columns):
            pixel = padded[:, down, across]
            higher = pixel > highest
            np.copyto(highest, pixel, where=higher)
            which[higher] = number
        output_storage[0][0], output_storage[1][0] = highest, which

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[Any]) -> list[Any]:
        n, height, width, channels = shapes[0]
        return [(n, *self._extents(height, width), channels)] * 2

    def pullback(self, inputs: list[Variable], outputs: list[Variable], cotangents: list[Variable]) -> Any:
        return [MaxPoolGradient(*self._props())(cotangents[0], outputs[1], inputs[0].shape)]

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [[True, False]]


class MaxPoolGradient(_Patchwise):
    """The gradient of `MaxPool`: to the pixel that was the maximum."""

    def make_node(self, gradient: Variable, which: Variable, shape: Variable) -> Apply:
        gradient, shape = pt.as_tensor_variable(gradient), pt.as_tensor_variable(shape)
        return Apply(self, [gradient, which, shape], [pt.tensor4(dtype=gradient.dtype)])

    def perform(self, node: Apply, inputs: list[Array], output_storage: list[list[Any]]) -> None:
        gradient, which, shape = inputs
        rows, columns = gradient.shape[1:3]
        n, height, width, channels = (int(extent) for extent in shape)
        padded = self._zeros(n, height, width, channels, gradient.dtype)
        for number, down, across in self._windows(rows, columns):
            padded[:, down, across] += np.where(which == number, gradient, 0)
        output_storage[0][0] = self._unpad(padded)

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[Any]) -> list[Any]:
        return [tuple(node.inputs[2][axis] for axis in range(4))]


class Stretch(Op):
    """The second input in the shape of the first, as a view that repeats it."""

    __props__ = ()
    view_map = {0: [1]}  # noqa: RUF012  (what PyTensor calls it)

    def make_node(self, like: Variable, value: Variable) -> Apply:
        return Apply(self, [like, value], [second(like, value).type()])

    def perform(self, node: Apply, inputs: list[Array], output_storage: list[list[Any]]) -> None:
        like, value = inputs
        output_storage[0][0] = np.broadcast_to(value, np.broadcast_shapes(like.shape, value.shape))

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[Any]) -> list[Any]:
        return [shapes[0]]


@node_rewriter([second])
def stretch_by_views(fgraph: Any, node: Apply) -> list[Variable]:
    """Replace `second`, which gradients of sums are made of and which NumPy would run element by element.

    PyTensor's own replacement infers the shapes of the whole graph each time, which takes seconds.
    """
    return [Stretch()(*node.inputs)]
