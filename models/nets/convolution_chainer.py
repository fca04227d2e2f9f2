"""Convolution in Chainer that is two to three times as fast on a CPU as its own.

Arrays are `(batch, channels, height, width)` to everybody, as is usual in Chainer, but lie in memory with the
batch innermost: `(channels, height, width, batch)`. So a convolution is one matrix product without any
transposition, and the pieces that it gathers are long. NumPy's functions, and so Chainer's, keep that order;
an array in another order is copied once.

Gradients of gradients are not defined.
"""

from __future__ import annotations

from typing import Any

import multiring.chainer  # isort: skip  # noqa: F401  # before chainer, which it makes importable

import chainer
import numpy as np
import numpy.typing as npt

__all__ = ["Convolution"]

Array = npt.NDArray[Any]


def _batch_last(x: Array) -> Array:
    """`(n, c, h, w)` as a contiguous `(c, h, w, n)`."""
    return np.ascontiguousarray(x.transpose(1, 2, 3, 0))


def _batch_first(x: Array) -> Array:
    """`(c, h, w, n)` seen as `(n, c, h, w)`; no copy."""
    return x.transpose(3, 0, 1, 2)


class Convolution(chainer.FunctionNode):
    """Square convolution without bias: `(n, c, h, w)` and weights `(out, c, k, k)` give `(n, out, h', w')`.

    Args:
        stride: In both directions.
        padding: Zeros on every side.
    """

    def __init__(self, stride: int, padding: int) -> None:
        self._stride = stride
        self._padding = padding

    def forward_cpu(self, inputs: tuple[Array, Array]) -> tuple[Array]:
        """The result; called by `apply`."""
        self.retain_inputs((0, 1))
        x, weight = inputs
        columns, (height, width) = self._columns(x, weight.shape[2])
        y = weight.reshape(len(weight), -1) @ columns
        return (_batch_first(y.reshape(len(weight), height, width, len(x))),)

    def backward(
        self, target_input_indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Gradients of those inputs that are wanted."""
        x, weight = (variable.array for variable in self.get_retained_inputs())
        gradient = _batch_last(grad_outputs[0].array)
        rows = gradient.reshape(len(gradient), -1)
        results = []
        if 0 in target_input_indexes:
            columns = weight.reshape(len(weight), -1).T @ rows
            results.append(chainer.Variable(self._scatter(columns, x.shape, weight.shape[2], gradient.shape)))
        if 1 in target_input_indexes:
            columns, _ = self._columns(x, weight.shape[2])
            # This way round it is a third faster than `rows @ columns.T`, there being few output channels.
            # In C order: ChainerMN's own communicators receive into a copy of any other array, and lose it.
            product = np.ascontiguousarray((columns @ rows.T).T)
            results.append(chainer.Variable(product.reshape(weight.shape)))
        return tuple(results)

    def _columns(self, x: Array, kernel: int) -> tuple[Array, tuple[int, int]]:
        """What each output reads, `(c * k * k, h' * w' * n)`, and the extents of the output."""
        stride, padding = self._stride, self._padding
        source = _batch_last(x)
        channels, _, _, count = source.shape
        if padding:
            source = np.pad(source, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
        height, width = ((extent - kernel) // stride + 1 for extent in source.shape[1:3])
        if kernel == 1 and stride == 1:
            return source.reshape(channels, -1), (height, width)
        columns = np.empty((channels, kernel, kernel, height, width, count), x.dtype)
        for i in range(kernel):
            for j in range(kernel):
                columns[:, i, j] = source[:, i::stride, j::stride][:, :height, :width]
        return columns.reshape(channels * kernel**2, -1), (height, width)

    def _scatter(self, columns: Array, shape: tuple[int, ...], kernel: int, output: tuple[int, ...]) -> Array:
        """The reverse of `_columns`: adds every column to where it was read."""
        count, channels, height, width = shape
        stride, padding = self._stride, self._padding
        if kernel == 1 and stride == 1 and not padding:
            return _batch_first(columns.reshape(channels, height, width, count))
        pieces = columns.reshape(channels, kernel, kernel, *output[1:])
        padded = np.zeros((channels, height + 2 * padding, width + 2 * padding, count), columns.dtype)
        for i in range(kernel):
            for j in range(kernel):
                padded[:, i::stride, j::stride][:, : output[1], : output[2]] += pieces[:, i, j]
        return _batch_first(padded[:, padding : padding + height, padding : padding + width])
