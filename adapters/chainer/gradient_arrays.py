"""The arrays that gradients lie in, in host memory or on a device, as the shared reducer takes them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from chainer.backends import cuda
from multiring.arrays import address_of, checksum
from multiring.chainer.arrays import on_device, to_host
from multiring.gradients.source import Gradient

__all__ = ["buffer_at", "checksum_of", "own_arrays", "reference_to"]


def buffer_at(array: Any) -> Gradient:
    """Memory of a gradient in C order; on a device, made by the current stream."""
    if not on_device(array):
        return Gradient(address_of(array), array)
    with array.device:
        stream = cuda.cupy.cuda.get_current_stream()
    return Gradient(array.data.ptr, array, array.device.id, stream.ptr)


def checksum_of(array: Any, before: int = 0) -> int:
    """A number that changes with every bit of the elements, wherever they lie."""
    return checksum(to_host(array), before)


def reference_to(array: Any) -> Callable[[], Any]:
    """Returns the array as long as there is one."""
    try:
        return weakref.ref(array)
    except TypeError:  # CuPy has no weak references in some releases
        return lambda: array


def own_arrays(gradients: Mapping[int, Any]) -> set[int]:
    """Indexes of the gradients in writable memory that no other of them shares."""
    # The addresses of devices and of the host are different ones.
    extents = sorted((*_extent(g), k) for k, g in gradients.items() if g.size)
    reach, last, shared = 0, -1, set()
    for begin, end, index in extents:
        if begin < reach:
            shared |= {last, index}
        if end > reach:
            reach, last = end, index
    return {index for _, _, index in extents if _is_writable(gradients[index])} - shared


def _is_writable(array: Any) -> bool:
    return on_device(array) or array.flags.writeable


def _extent(array: Any) -> tuple[int, int]:
    """The addresses where an array begins and ends."""
    first = array.data.ptr if on_device(array) else address_of(array)
    if array.flags.c_contiguous:
        return first, first + array.nbytes
    spans = [(length - 1) * step for length, step in zip(array.shape, array.strides, strict=True)]
    begin, end = (first + sum(span for span in spans if (span < 0) == low) for low in (True, False))
    return begin, end + array.itemsize
