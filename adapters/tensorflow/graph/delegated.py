"""Operations of graphs whose work a function of this process does: names, order and threads are those of the
other operations, and no thread of TensorFlow waits for them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tensorflow as tf
from multiring.tensorflow.graph.library import native_library, register_one_rank
from multiring.tensorflow.graph.order import run

__all__ = ["Delegated", "add_to_graph", "delegate_to", "new_owner"]

Array = NDArray[Any]


class _HostTensor(ctypes.Structure):
    """HostTensor of native/delegated.h."""

    _fields_ = (
        ("type", ctypes.c_int32),
        ("dims", ctypes.c_int32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
    )


_Function = ctypes.CFUNCTYPE(
    *(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int32),
    ctypes.POINTER(_HostTensor),
)
_kept: list[Any] = []  # what native code calls must not be freed


class Delegated:
    """One execution of an operation, to be ended by one call of `succeed` or `fail`, in any thread.

    Attributes:
        owner: Number that `new_owner` gave.
        name: What the ranks match it by.
        asked: The text that was given to `add_to_graph`.
        inputs: Memory of TensorFlow, valid until the operation has ended.
        outputs: Where the results of an operation that keeps shapes belong; None: `succeed` takes them.
    """

    def __init__(self, call: int, owner: int, name: str, asked: str, tensors: Sequence[_HostTensor]) -> None:
        self._call = call
        self.owner, self.name, self.asked = owner, name, asked
        self.inputs = [_view(tensor, tensor.input) for tensor in tensors]
        keeps = all(tensor.output is not None for tensor in tensors) and len(tensors) > 0
        self.outputs = [_view(tensor, tensor.output) for tensor in tensors] if keeps else None

    def succeed(self, results: Sequence[Array] = ()) -> None:
        """Ends it with results, which are copied; with none where `outputs` have been written."""
        arrays = [np.ascontiguousarray(array).reshape(np.shape(array)) for array in results]
        shapes = [(ctypes.c_int64 * array.ndim)(*array.shape) for array in arrays]
        tensors = (_HostTensor * len(arrays))()
        for tensor, array, shape in zip(tensors, arrays, shapes, strict=True):
            tensor.type = tf.dtypes.as_dtype(array.dtype).as_datatype_enum
            tensor.dims = array.ndim
            tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
            tensor.input = array.ctypes.data
        native_library().multiring_tensorflow_finish_delegated(self._call, 0, b"", len(arrays), tensors)

    def fail(self, code: int, message: str) -> None:
        """Ends it with one of TensorFlow's error codes."""
        _fail(self._call, code, message)


def delegate_to(function: Callable[[Delegated], None]) -> None:
    """Has all delegated operations of this process done by a function, which must not wait for them."""

    @_Function
    def called(call: int, owner: int, name: bytes, asked: bytes, count: int, tensors: Any) -> None:
        try:
            function(Delegated(call, owner, name.decode(), asked.decode(), tensors[:count]))
        except BaseException as error:  # it would get lost in native code, and the step wait for ever
            _fail(call, tf.errors.INTERNAL, f"{type(error).__name__}: {error}")

    _kept.append(called)
    native = native_library()
    native.multiring_tensorflow_finish_delegated.argtypes = (
        *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p, ctypes.c_int32),
        ctypes.POINTER(_HostTensor),
    )
    native.multiring_tensorflow_finish_delegated.restype = None
    native.multiring_tensorflow_set_delegate.argtypes = (_Function,)
    native.multiring_tensorflow_set_delegate.restype = None
    native.multiring_tensorflow_set_delegate(called)


def new_owner() -> int:
    """A number that tells operations of one owner, such as a group of ranks, from those of others."""
    return register_one_rank()


def add_to_graph(
    tensors: Sequence[Any],
    result_types: Sequence[Any],
    *,
    owner: int,
    name: str,
    asked: str,
    same_shapes: bool = False,
) -> list[Any]:
    """Adds an operation to the graph that is being built, in the order of its name.

    Args:
        tensors: Its inputs.
        result_types: The dtypes of its results.
        owner: Of `new_owner`.
        name: What the ranks match it by.
        asked: What the delegate has to know.
        same_shapes: The results have the shapes and dtypes of the inputs, and take their memory where
            TensorFlow has no other use for it.
    """
    results = run(
        "multiring_delegated",
        list(tensors),
        Tout=list(result_types),
        asked=asked,
        same_shapes=int(same_shapes),
        communicator=owner,
        tensor_name=name,
        priority=0,
    )
    return list(results)


def _view(tensor: _HostTensor, address: int) -> Array:
    dtype = np.dtype(tf.dtypes.as_dtype(tensor.type).as_numpy_dtype)
    shape = tuple(tensor.shape[: tensor.dims])
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if size == 0:
        return np.empty(shape, dtype)
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype).reshape(shape)


def _fail(call: int, code: int, message: str) -> None:
    native_library().multiring_tensorflow_finish_delegated(call, code, message.encode(), 0, None)
