"""Arrays of any library, told apart by protocol: no framework is imported or named here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from multiring import _core
from multiring.errors import UsageError
from multiring.types import Array

__all__ = [
    "STREAMING_BYTES",
    "Pieces",
    "address_of",
    "arrived",
    "as_array",
    "bytes_of",
    "checksum",
    "contiguous",
    "copy_into",
    "copy_large",
    "empty_like",
    "joined",
    "like",
    "multiply",
    "mutable",
    "require_memory",
    "set_arrays",
    "set_input",
    "set_output",
    "use_of",
    "without_gradient",
    "without_mask",
]

# From here on an array that is copied is not worth a place in the caches: with the buckets of a model whose
# gradients are this large it would be gone before it is read.
STREAMING_BYTES = 256 * 1024


class Pieces(NamedTuple):
    """An array that lies in pieces.

    Attributes:
        dtype: Of the elements.
        addresses: Of the pieces, in the order of the elements.
        lengths: Bytes at each address, a multiple of the element's.
        owners: Keep the memory alive; held until an operation is done.
        devices: The device that each piece lies on, -1: the host; empty where all lie there.
        streams: For each piece the stream that makes it, as many as `devices`.
    """

    dtype: str
    addresses: Sequence[int]
    lengths: Sequence[int]
    owners: object
    devices: Sequence[int] = ()
    streams: Sequence[int] = ()


_PLAIN = (bool, int, float, complex, list, tuple)
_BYTES = (bytes, bytearray, memoryview)


def _maker(x: Array, name: str) -> Any:
    """The function `name` of the library that the type of `x`, or the nearest of its bases, comes from."""
    for base in type(x).__mro__:
        # The library is imported, or its array would not exist.
        made = getattr(sys.modules.get(base.__module__.partition(".")[0]), name, None)
        if made is not None:
            return made
    return None


def as_array(x: Any) -> Array:
    """Python numbers and sequences as NumPy arrays; arrays as they are.

    Raises:
        UsageError: It makes no array, requires a gradient, or is masked.
    """
    if type(x) is np.ndarray:
        return x
    if not isinstance(x, _PLAIN):
        return without_gradient(arrived(x))
    for part in x if isinstance(x, list | tuple) else ():
        as_array(part) if isinstance(part, list | tuple) else without_mask(part)
    try:
        return np.asarray(x)
    except ValueError as error:
        raise UsageError(f"a {type(x).__name__} does not make an array: {error}") from None


def arrived(x: Array) -> Array:
    """Return the array itself, or what a result of a functional collective that is on its way has become."""
    return x.trigger_wait() if hasattr(x, "trigger_wait") else x


def without_mask(x: Any, what: str = "an array") -> Any:
    """Return `x` itself. Raise UsageError if it is a masked array of NumPy, whose mask would get lost.

    Args:
        x: Anything.
        what: The array in the message.
    """
    # NumPy imports the module with the first masked array.
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(x, masked.MaskedArray):
        raise UsageError(
            f"{what} is masked, and its mask would get lost on the way to other ranks: pass x.filled(value), "
            "or x.data and the mask as two arrays"
        )
    return x


def without_gradient(x: Array) -> Array:
    """Return `x` itself. Raise UsageError where its library would differentiate through what happens to it,
    and where `x` is masked."""
    without_mask(x)
    if getattr(x, "requires_grad", False):
        raise UsageError(
            f"the array, a {type(x).__name__}, requires a gradient, and none goes through a collective: pass "
            "tensor.detach(), or tensor.grad for its gradient"
        )
    return x


def mutable(x: Array) -> Array:
    """Return `x` itself. Raise UsageError if it is of a library whose arrays do not change (JAX's, tensors of
    TensorFlow): other arrays, and what the library keeps, may have the same memory."""
    kind = type(x)
    if hasattr(kind, "__add__") and not hasattr(kind, "__iadd__") and hasattr(x, "__dlpack__"):
        raise UsageError(
            f"arrays of type {kind.__name__} do not change, and so cannot be written to: take what the call "
            "returns, without out="
        )
    return x


def contiguous(x: Array) -> Array:
    """`x` itself if its elements lie in C order, else a copy that does."""
    if isinstance(x, np.ndarray | np.generic):
        return x if x.flags.c_contiguous else np.ascontiguousarray(x)
    if isinstance(x, memoryview):
        return x if x.c_contiguous else np.ascontiguousarray(x)
    if hasattr(x, "is_contiguous"):
        try:
            if not x.is_contiguous():
                return x.contiguous()
            # Views of Torch's whose memory holds other elements: DLPack would give those.
            x = x.resolve_conj() if hasattr(x, "is_conj") and x.is_conj() else x
            return x.resolve_neg() if hasattr(x, "is_neg") and x.is_neg() else x
        except RuntimeError:  # a sparse tensor: the native core says what is wrong with it
            return x
    if _is_on_device(x) and not x.flags.c_contiguous:  # named as in NumPy, where there is such a function
        make = _maker(x, "ascontiguousarray")
        return x if make is None else make(x)
    return x


def joined(arrays: Sequence[Any]) -> Any:
    """The elements of arrays of one library, dtype and device, one after the other. Shape (elements,)."""
    flat = [contiguous(x).reshape(-1) for x in arrays]
    return (_maker(flat[0], "concatenate") or np.concatenate)(flat)


def _is_on_device(x: Array) -> bool:
    return hasattr(type(x), "__cuda_array_interface__") and hasattr(x, "flags")


def empty_like(x: Array) -> Array:
    """Return a new C-ordered array of the kind, shape and dtype of `x`; of NumPy where a kind makes none."""
    if isinstance(x, np.ndarray | np.generic):
        return np.empty(x.shape, x.dtype)
    if hasattr(x, "new_empty"):
        try:
            # The function gives the order of `x`, and takes a third of the time.
            make = _maker(x, "empty_like") if x.is_contiguous() else None
            return x.new_empty(x.shape) if make is None else make(x)
        except Exception:  # a tensor that stands for others: what is wrong is better said here
            require_memory(x)
            raise
    make = _maker(x, "empty_like")
    if make is not None:
        return make(x)
    if hasattr(x, "__cuda_array_interface__"):
        raise UsageError(
            f"there is no function that makes a new {type(x).__name__}; pass out=, for example a NumPy array"
        )
    # NumPy would take bytes for a text.
    return np.empty_like(np.asarray(memoryview(x) if isinstance(x, _BYTES) else x))


def copy_into(out: Array, x: Array) -> None:
    """Copies `x` into the (perhaps strided) `out` of the same shape."""
    out[...] = x


def address_of(x: np.ndarray[Any, Any]) -> int:
    """Address of the first element; a tenth of the time of `x.ctypes.data`."""
    return _core.address_of(x)


def checksum(x: np.ndarray[Any, Any], seed: int = 0) -> int:
    """A number (64 bits) that changes with every bit of the elements, in C order, at the speed of memory."""
    x = np.ascontiguousarray(x)
    return _core.checksum(_core.address_of(x), x.nbytes, seed)


def multiply(x: Array, factor: float) -> None:
    """Multiply a contiguous array in place, as a reduction with this `postscale` does.

    The bits do not depend on the floating point modes of a rank's threads; half precision is rounded once.
    """
    _core.ArrayReduction([x], [x], _core.ReduceOp.SUM, factor)()


def copy_large(out: int, x: int, nbytes: int) -> None:
    """Copies memory past the caches.

    Args:
        out: Address to copy to.
        x: Address to copy from; the two ranges must not overlap.
        nbytes: Bytes, `STREAMING_BYTES` or more, or it is faster to copy them otherwise.
    """
    _core.copy_streaming(out, x, nbytes)


def like(x: Array, result: _core.Result) -> Array:
    """The memory of `result` as an array of the kind of `x`, without a copy."""
    if not isinstance(x, np.ndarray | np.generic):
        take = _maker(x, "from_dlpack")
        if take is not None:
            return take(result)
        if result.on_device:  # what takes DLPack takes it
            return result
    array = result.numpy()
    # Where an extension dtype such as bfloat16 came in, NumPy itself has no name for it.
    dtype = getattr(x, "dtype", None)
    return array.view(dtype) if result.dtype == "bfloat16" and isinstance(dtype, np.dtype) else array


def set_input(operation: _core.Operation, x: Array) -> Array:
    """Set the array that an operation reads, when it begins; one with gaps on a device is copied at once.

    Returns:
        The array that was set.

    Raises:
        UsageError: `x` makes no array, requires a gradient, or has no memory of its own.
    """
    x = as_array(x)
    if not operation.set_input(x):
        x = contiguous(x)
        operation.set_input(x)
    return x


def set_output(operation: _core.Operation, out: Array) -> Callable[[Any], Array]:
    """Set the array that an operation writes, before it ends; one with gaps on a device is written to when
    the operation is waited for.

    Returns:
        A function that takes the finished operation and returns `out`.

    Raises:
        UsageError: `out` is read-only, requires a gradient, has no memory of its own, or elements of it share
            memory.
    """
    return _set_output(operation, out if type(out) is np.ndarray else mutable(without_gradient(out)))


def _set_output(operation: _core.Operation, out: Array) -> Callable[[Any], Array]:
    """Set an output that may be a new array of a library whose arrays do not change."""
    if operation.set_output(out):
        return lambda done: out
    target = contiguous(out)
    operation.set_output(target)

    def finish(done: Any) -> Array:
        copy_into(out, target)
        return out

    return finish


def require_memory(x: Array) -> None:
    """Raise UsageError if an array has no memory of its own, such as a tensor that stands for others, or if
    its memory does not hold all its elements."""
    _core.require_memory(x)


def bytes_of(x: Array) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the memory of a contiguous array on the host as bytes, shape (nbytes,); it is not copied.

    Raises:
        UsageError: The array has gaps, lies on a device, or its memory does not hold its elements.
    """
    return _core.bytes_of(x)


def use_of(x: Array, *, is_written: bool = False) -> _core.Operation:
    """Return an operation that stands for a use of the contiguous `x`, to ask what conflicts with it."""
    operation = _core.Operation(_core.OpKind.RECV if is_written else _core.OpKind.SEND)
    if is_written:
        operation.set_output(x)
    else:
        operation.set_input(x)
    return operation


def set_arrays(operation: _core.Operation, x: Array, out: Array | None) -> Callable[[Any], Array]:
    """Set input and output of an operation whose result is as large as its input."""
    source = set_input(operation, x)
    return _set_output(operation, empty_like(source)) if out is None else set_output(operation, out)
