"""Arrays on the devices of the stand-in for the driver (tests/cpp/fake_cuda), as a library such as CuPy
has them.

They speak the CUDA array interface. What is done to them is work of the current stream, and done when that
gets there; only `get` waits. The stand-in is opened at the first use, in processes that have it loaded
(stand_in.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

BUSY_SECONDS = 0.02
_LEGACY_STREAM = 1

# multiring finds a library's functions by the first part of the name of the module of its arrays.
sys.modules["fake_arrays"] = sys.modules[__name__]
_current = SimpleNamespace(stream=_LEGACY_STREAM)


@functools.cache
def driver() -> Any:
    """The stand-in, which this process has loaded."""
    found = ctypes.CDLL(os.environ.get("FAKE_DRIVER", "libcuda.so.1"))
    size, address, floating = ctypes.c_size_t, ctypes.c_size_t, ctypes.c_float
    extents = ctypes.POINTER(ctypes.c_int64)
    for name, result, arguments in (
        ("configure", None, [ctypes.c_char_p]),
        ("calls", ctypes.c_int, [ctypes.c_char_p]),
        ("stream", address, [ctypes.c_int]),
        ("capture", None, [address, ctypes.c_int]),
        ("allocate", address, [ctypes.c_int, size]),
        ("allocate_managed", address, [ctypes.c_int, size]),
        ("free", None, [address, address]),
        ("write", None, [address, address, ctypes.c_void_p, size]),
        ("copy", None, [address, address, extents, address, extents, extents, ctypes.c_int, size]),
        ("scale", None, [address, address, address, size, floating, floating]),
        ("order", None, [address, address]),
        ("busy", None, [address, ctypes.c_double]),
        ("fail", None, [address, ctypes.c_int]),
        ("read", ctypes.c_int, [address, ctypes.c_void_p, address, size]),
    ):
        function = getattr(found, f"fake_cuda_{name}")
        function.restype, function.argtypes = result, arguments
    return found


def configure(options: str) -> None:
    """Sets options of FakeMachine::configure in this process."""
    driver().fake_cuda_configure(options.encode())


class _Memory:
    """An allocation, which is freed when the stream that was current then gets there."""

    def __init__(self, nbytes: int, device: int, *, managed: bool = False) -> None:
        allocate = driver().fake_cuda_allocate_managed if managed else driver().fake_cuda_allocate
        self._stream, self.device = _current.stream, device
        self.address = allocate(device, nbytes)
        assert self.address, "no memory left"

    def __del__(self) -> None:
        driver().fake_cuda_free(self._stream, self.address)


class _Imported:
    """Memory of another process."""

    def __init__(self, handle: bytes, device: int) -> None:
        address, self.device = ctypes.c_size_t(), device
        with _context(device):
            taken = driver().cuIpcOpenMemHandle_v2(
                ctypes.byref(address), _IpcHandle.from_buffer_copy(handle), 1
            )
        assert taken == 0, taken
        self.address = address.value

    def __del__(self) -> None:
        with _context(self.device):
            driver().cuIpcCloseMemHandle(ctypes.c_size_t(self.address))


class _IpcHandle(ctypes.Structure):
    _fields_ = (("words", ctypes.c_uint64 * 8),)


@contextlib.contextmanager
def _context(device: int) -> Iterator[None]:
    context = ctypes.c_void_p()
    assert driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    assert driver().cuCtxPushCurrent_v2(context) == 0
    try:
        yield
    finally:
        assert driver().cuCtxPopCurrent_v2(ctypes.byref(context)) == 0


class _Layout:
    """Lets NumPy do the arithmetic of addresses: it does not look at the elements of what it slices."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: Any) -> None:
        typestr = np.dtype(dtype).str
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": typestr,
            "version": 3,
        }


class Array:
    """An array on a device. Arithmetic is for contiguous float32."""

    __module__ = "fake_arrays"

    def __init__(self, layout: np.ndarray[Any, Any], owner: object) -> None:
        self._layout, self._owner = layout, owner
        self.shape, self.dtype = layout.shape, layout.dtype
        self.flags = SimpleNamespace(c_contiguous=layout.flags.c_contiguous)

    @property
    def address(self) -> int:
        return int(self._layout.__array_interface__["data"][0])

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": None if self.flags.c_contiguous else self._layout.strides,
            "stream": _current.stream,
            "version": 3,
        }

    def get(self) -> np.ndarray[Any, Any]:
        """A copy on the host, when the current stream is done."""
        source = ascontiguousarray(self)
        result = np.empty(self.shape, self.dtype)
        failed = driver().fake_cuda_read(_current.stream, result.ctypes.data, source.address, result.nbytes)
        assert not failed, "the stream never ends"
        return result

    def __getitem__(self, key: Any) -> Array:
        return Array(self._layout[key], self._owner)

    def __setitem__(self, key: Any, values: Array) -> None:
        copy(self[key], values)

    def __add__(self, summand: float) -> Array:
        return self._scaled(1, summand, empty_like(self))

    def __mul__(self, factor: float) -> Array:
        return self._scaled(factor, 0, empty_like(self))

    def __iadd__(self, summand: float) -> Array:
        return self._scaled(1, summand, self)

    def __imul__(self, factor: float) -> Array:
        return self._scaled(factor, 0, self)

    def _scaled(self, factor: float, summand: float, out: Array) -> Array:
        assert self.flags.c_contiguous
        assert self.dtype == np.float32
        size = int(np.prod(self.shape))
        driver().fake_cuda_scale(_current.stream, out.address, self.address, size, factor, summand)
        return out


def layout(address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """What NumPy takes for an array at an address, which it must not look at."""
    return np.asarray(_Layout(address, shape, dtype))


def empty(shape: tuple[int, ...], dtype: Any, device: int = 0, *, managed: bool = False) -> Array:
    memory = _Memory(int(np.prod(shape)) * np.dtype(dtype).itemsize, device, managed=managed)
    return Array(np.asarray(_Layout(memory.address, shape, dtype)), memory)


def array(values: Any, device: int = 0, *, managed: bool = False) -> Array:
    values = np.ascontiguousarray(values)
    made = empty(values.shape, values.dtype, device, managed=managed)
    driver().fake_cuda_write(_current.stream, made.address, values.ctypes.data, values.nbytes)
    return made


def full(count: int, value: float, device: int = 0) -> Array:
    return array(np.full(count, value, np.float32), device)


def export(x: Array) -> bytes:
    """What another process on this host needs to have the array's memory (cuIpcGetMemHandle)."""
    handle = _IpcHandle()
    with _context(0):
        assert driver().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_size_t(x.address)) == 0
    return bytes(handle)


def import_array(handle: bytes, shape: tuple[int, ...], dtype: Any) -> Array:
    memory = _Imported(handle, 0)
    return Array(np.asarray(_Layout(memory.address, shape, dtype)), memory)


def empty_like(x: Array) -> Array:
    return empty(x.shape, x.dtype, getattr(x._owner, "device", 0))


def ascontiguousarray(x: Array) -> Array:
    if x.flags.c_contiguous:
        return x
    made = empty_like(x)
    copy(made, x)
    return made


def copy(to: Array, source: Array) -> None:
    """Work of the current stream: copies elements between arrays that need not be contiguous."""
    assert to.shape == source.shape
    dims = len(to.shape)
    extents = ctypes.c_int64 * dims
    strides = [extents(*x._layout.strides) for x in (to, source)]
    driver().fake_cuda_copy(
        _current.stream,
        to.address,
        strides[0],
        source.address,
        strides[1],
        extents(*to.shape),
        dims,
        to.dtype.itemsize,
    )


def current_stream() -> int:
    return int(_current.stream)


def use_stream(stream: int) -> int:
    """Makes a stream the current one; the one before."""
    before, _current.stream = _current.stream, stream
    return int(before)


@contextlib.contextmanager
def stream(device: int = 0) -> Iterator[int]:
    """A stream of its own, which is the current one in the block."""
    before = use_stream(driver().fake_cuda_stream(device))
    try:
        yield _current.stream
    finally:
        use_stream(before)


def busy(seconds: float = BUSY_SECONDS) -> None:
    """Gives the current stream work that takes so long."""
    driver().fake_cuda_busy(_current.stream, seconds)


def fail(result: int) -> None:
    """Gives the current stream a kernel that fails with this error of CUDA's."""
    driver().fake_cuda_fail(_current.stream, result)


class DlpackArray(Array):
    """The same memory, which its library gives by DLPack only."""

    __module__ = "fake_arrays"

    def __init__(self, x: Array) -> None:
        super().__init__(x._layout, x._owner)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise AttributeError("not of this kind")

    def __dlpack_device__(self) -> tuple[int, int]:
        return _ROCM if "FAKE_DRIVER" in os.environ else _CUDA, getattr(self._owner, "device", 0)

    def __dlpack__(self, *, stream: int) -> object:
        """Work that `stream` is given from now on comes after that of the current stream."""
        assert stream == (0 if "FAKE_DRIVER" in os.environ else _LEGACY_STREAM), stream
        driver().fake_cuda_order(_current.stream, stream)
        return _export(self)


class _DlTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_size_t),
        ("device_type", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("dims", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
    )


class _DlManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _DlTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_CUDA, _ROCM = 2, 10
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}


_exported: dict[int, tuple[object, ...]] = {}  # what lives as long as a capsule, by its address


def _export(x: DlpackArray) -> object:
    dims = len(x.shape)
    shape = (ctypes.c_int64 * dims)(*x.shape)
    strides = (ctypes.c_int64 * dims)(*(stride // x.dtype.itemsize for stride in x._layout.strides))
    managed = _DlManagedTensor()
    tensor = managed.tensor
    tensor.data, tensor.device_type, tensor.device = x.address, *x.__dlpack_device__()
    tensor.dims, tensor.lanes = dims, 1
    tensor.code, tensor.bits = _CODES[x.dtype.kind], 8 * x.dtype.itemsize
    tensor.shape, tensor.strides = shape, ctypes.addressof(strides)
    address = ctypes.addressof(managed)
    _exported[address] = managed, shape, strides, x
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make(address, b"dltensor", ctypes.cast(_forget, ctypes.c_void_p))


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _forget(capsule: int) -> None:
    pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    address = pointer_of(("PyCapsule_GetPointer", ctypes.pythonapi))(capsule, b"dltensor")
    _exported.pop(address)


def from_dlpack(result: Any) -> Array:
    """The memory of a result of multiring's, which is contiguous and complete."""
    assert result.__dlpack_device__()[0] == (_ROCM if "FAKE_DRIVER" in os.environ else _CUDA)
    capsule = result.__dlpack__()
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = _DlTensor.from_address(pointer_of(capsule, b"dltensor"))
    shape = tuple(tensor.shape[: tensor.dims])
    return Array(np.asarray(_Layout(tensor.data, shape, result.dtype)), capsule)
