"""The arrays that gradients lie in, in host memory or on a device, as the shared reducer takes them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from chainer.backends import cuda
from multiring.arrays import address_of, checksum
from multiring.chainer.arrays import on_device, to_host
from multiring.gradients.source import Gradient

__all__ = ["buffer_at", "checksum_of", "extent", "merged", "own_arrays", "reference_to"]

# The effort that NumPy may spend on finding out whether two arrays share an element.
_MAX_WORK = 1000


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
    """Return the indexes of the gradients that lie in writable memory, have no element twice, and share none
    with another one."""
    # The addresses of devices and of the host are different ones.
    extents = sorted((*extent(g), k) for k, g in gradients.items() if g.size)
    # The ends and indexes of arrays that reach beyond the beginning of the next one.
    reached: list[tuple[int, int]] = []
    shared = set()
    for begin, end, index in extents:
        reached = [one for one in reached if one[0] > begin]
        for _, other in reached:
            if _share(gradients[other], gradients[index]):
                shared |= {other, index}
        reached.append((end, index))
    return {k for _, _, k in extents if _is_writable(gradients[k]) and not _repeats(gradients[k])} - shared


def _is_writable(array: Any) -> bool:
    return on_device(array) or array.flags.writeable


def _share(array: Any, other: Any) -> bool:
    """Return whether two arrays whose extents overlap have an element in common, which columns of one matrix
    have not."""
    if on_device(array):
        return True
    try:
        return np.shares_memory(array, other, max_work=_MAX_WORK)
    except np.exceptions.TooHardError:
        return True


def _repeats(array: Any) -> bool:
    """Return whether an array may have several elements in one place, as one that was broadcast has."""
    reach = array.itemsize
    for step, length in sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if step < reach:
            return True
        reach += step * (length - 1)
    return False


def extent(array: Any) -> tuple[int, int]:
    """Return the addresses at which an array begins and ends."""
    first = array.data.ptr if on_device(array) else address_of(array)
    if array.flags.c_contiguous:
        return first, first + array.nbytes
    spans = [(length - 1) * step for length, step in zip(array.shape, array.strides, strict=True)]
    begin, end = (first + sum(span for span in spans if (span < 0) == low) for low in (True, False))
    return begin, end + array.itemsize


def merged(extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges of addresses in ascending order, of which those that overlap or touch are made one."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(extents):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found
