"""What XLA does to the handlers of multiring.jax in a program on a device of the stand-in: call frames made
by hand, arrays on one stream, and the memory of a call used again as soon as that is allowed.

The structs are those of XLA's own header, with which tests/adapters/jax/test_jax_devices.py compares the
handlers' (adapters/jax/native/xla_ffi.h).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from multiring import Communicator, _core
from multiring.derived import shared_queue
from multiring.error_text import address_for_native_code
from tests.gpu import fake_arrays
from tests.gpu.fake_arrays import Array

_DTYPES = {
    "bool": 1,
    "int8": 2,
    "int32": 4,
    "int64": 5,
    "uint32": 8,
    "uint64": 9,
    "float32": 11,
    "float64": 12,
}
_TOKEN, _INT64, _FLOAT64 = 17, 5, 12
_ARRAY, _SCALAR, _STRING = 1, 3, 4
_EXECUTE = 3


def _struct(name: str, *fields: Any, base: bool = True) -> Any:
    first = [("struct_size", c_size_t), ("extension_start", c_void_p)] if base else []
    return type(name, (ctypes.Structure,), {"_fields_": [*first, *fields]})


_Version = _struct("_Version", ("major", c_int), ("minor", c_int))
_ErrorArgs = _struct("_ErrorArgs", ("message", c_char_p), ("code", c_int))
_StreamArgs = _struct("_StreamArgs", ("context", c_void_p), ("stream", c_void_p))
_CREATE_ERROR = ctypes.CFUNCTYPE(c_void_p, POINTER(_ErrorArgs))
_GET_STREAM = ctypes.CFUNCTYPE(c_void_p, POINTER(_StreamArgs))
_Api = _struct(
    "_Api",
    *(("version", _Version), ("internal", c_void_p), ("error_create", _CREATE_ERROR)),
    *((name, c_void_p) for name in ("error_get_message", "error_destroy", "handler_register")),
    ("stream_get", _GET_STREAM),
)
_Buffer = _struct(
    "_Buffer", ("dtype", c_int), ("data", c_void_p), ("rank", c_int64), ("dims", POINTER(c_int64))
)
_Values = _struct("_Values", ("size", c_int64), ("types", POINTER(c_int)), ("values", POINTER(c_void_p)))
_Attributes = _struct(
    "_Attributes",
    ("size", c_int64),
    ("types", POINTER(c_int)),
    *(("names", POINTER(c_void_p)), ("values", POINTER(c_void_p))),
)
_Span = _struct("_Span", ("data", c_char_p), ("size", c_size_t), base=False)
_Scalar = _struct("_Scalar", ("dtype", c_int), ("value", c_void_p), base=False)
_Array = _struct("_Array", ("dtype", c_int), ("size", c_size_t), ("data", c_void_p), base=False)
_Frame = _struct(
    "_Frame",
    *(("api", POINTER(_Api)), ("context", c_void_p), ("stage", c_int)),
    *(("arguments", _Values), ("results", _Values), ("attributes", _Attributes)),
)
_Metadata = _struct("_Metadata", ("size", c_size_t), ("version", _Version), ("traits", c_uint32), base=False)


class HandlerError(Exception):
    """What a handler has returned."""


_NO_STREAM = 77  # an error of XLA's own
_errors: list[str] = []


@_CREATE_ERROR
def _create_error(args: Any) -> int:
    _errors.append(args.contents.message.decode())
    return len(_errors)


@_GET_STREAM
def _get_stream(args: Any) -> int | None:
    """A frame's context is its stream."""
    args.contents.stream = args.contents.context
    return None if args.contents.context else _NO_STREAM


_api = _Api(ctypes.sizeof(_Api), None, _Version(ctypes.sizeof(_Version), None, 0, 1), None)
_api.error_create, _api.stream_get = _create_error, _get_stream


@functools.cache
def library() -> Any:
    found = ctypes.CDLL(str(Path(_core.__file__).parent / "jax" / "libmultiring_jax.so"))
    found.multiring_jax_register_queue.restype = c_int64
    found.multiring_jax_pending_calls.restype = c_int64
    for name in ("start_cuda", "done_cuda", "check_cuda"):
        function = getattr(found, f"multiring_jax_{name}")
        function.restype, function.argtypes = c_void_p, [POINTER(_Frame)]
    return found


class _Kept(list[Any]):
    """What C has the addresses of."""

    def address(self, made: Any) -> int:
        self.append(made)
        return ctypes.addressof(made)

    def array(self, kind: Any, values: Sequence[Any]) -> Any:
        self.append((kind * max(len(values), 1))(*values))
        return self[-1]


def _values(kept: _Kept, arrays: Sequence[Array | None]) -> Any:
    buffers = []
    for x in arrays:  # None: a token
        shape = x.shape if x is not None else ()
        dtype = _DTYPES[x.dtype.name] if x is not None else _TOKEN
        data = x.address if x is not None else None
        dims = kept.array(c_int64, shape)
        size = ctypes.sizeof(_Buffer)
        buffers.append(kept.address(_Buffer(size, None, dtype, data, len(shape), dims)))
    types, addresses = kept.array(c_int, [1] * len(buffers)), kept.array(c_void_p, buffers)
    return _Values(ctypes.sizeof(_Values), None, len(buffers), types, addresses)


def _attribute(kept: _Kept, value: Any) -> tuple[int, int]:
    if isinstance(value, str):
        data = value.encode()
        return _STRING, kept.address(_Span(data, len(data)))
    if isinstance(value, float):
        return _SCALAR, kept.address(_Scalar(_FLOAT64, kept.address(c_double(value))))
    if isinstance(value, int):
        return _SCALAR, kept.address(_Scalar(_INT64, kept.address(c_int64(value))))
    numbers = kept.array(c_int64, value)
    return _ARRAY, kept.address(_Array(_INT64, len(value), ctypes.addressof(numbers)))


def call(
    handler: str,
    arguments: Sequence[Array | None],
    results: Sequence[Array | None],
    attributes: dict[str, Any],
    stream: int,
) -> None:
    """Calls a handler as XLA does; HandlerError if it fails."""
    kept = _Kept()
    names = [kept.address(_Span(name.encode(), len(name))) for name in attributes]
    kinds, addresses = zip(*(_attribute(kept, value) for value in attributes.values()), strict=True) or (
        (),
        (),
    )
    given = _Attributes(
        *(ctypes.sizeof(_Attributes), None, len(names)),
        *(kept.array(c_int, kinds), kept.array(c_void_p, names), kept.array(c_void_p, addresses)),
    )
    frame = _Frame(
        *(ctypes.sizeof(_Frame), None, ctypes.pointer(_api), stream, _EXECUTE),
        *(_values(kept, arguments), _values(kept, results), given),
    )
    if error := getattr(library(), f"multiring_jax_{handler}")(ctypes.byref(frame)):
        raise HandlerError("no stream" if error == _NO_STREAM else _errors[error - 1])


def traits(handler: str) -> int:
    """What a handler answers when XLA registers it."""
    metadata = _Metadata(ctypes.sizeof(_Metadata), _Version(), 255)

    class _Extension(ctypes.Structure):
        _fields_ = (("size", c_size_t), ("type", c_int), ("next", c_void_p), ("metadata", c_void_p))

    extension = _Extension(ctypes.sizeof(_Extension), 1, None, ctypes.addressof(metadata))
    frame = _Frame(ctypes.sizeof(_Frame), ctypes.addressof(extension), ctypes.pointer(_api))
    assert not getattr(library(), f"multiring_jax_{handler}")(ctypes.byref(frame))
    assert metadata.version.major == 0
    return int(metadata.traits)


_IN_PLACE = ("allreduce", "broadcast")
_OPTIONS = {"op": 0, "root": -1, "prescale": 1.0, "postscale": 1.0, "ordered": 1, "inside": "", "counts": 1}


class Program:
    """The calls of one rank's program. `aliased`: results lie where the arguments do, wherever they may."""

    def __init__(self, comm: Communicator, stream: int, *, aliased: bool = False, device: int = 0) -> None:
        self.comm, self.stream, self.aliased, self.device = comm, stream, aliased, device
        address = address_for_native_code(shared_queue(comm, "queue"))
        self.queue = int(library().multiring_jax_register_queue(c_void_p(address)))
        self._counts = 0

    def start(self, kind: str, name: str, arrays: Sequence[Array], rows: int = 0, **options: Any) -> Any:
        """`rows`: those of a result. What `done` takes."""
        in_place = kind in _IN_PLACE
        given = [x if self.aliased else fake_arrays.empty_like(x) for x in arrays]
        made = [] if in_place else [self._empty((rows, *x.shape[1:]), x.dtype) for x in arrays]
        ticket = self._empty((2,), np.uint32)
        attributes = {
            "kind": int(_core.OpKind.__members__[kind.upper()].value),
            "queue": self.queue,
            "name": name,
            "labels": "\n".join(f"{name}/{i}" for i in range(len(arrays))),
            "counter": name,
        }
        results = [ticket, *given, *made]
        call("start_cuda", [None, *arrays], [None, *results], _OPTIONS | attributes | options, self.stream)
        if not self.aliased:
            for x in arrays:  # XLA uses the memory of arguments again
                _overwrite(x)
        return results, len(given) if not in_place else 0

    def done(self, started: Any) -> list[Array]:
        results, skipped = started
        last = results[1 + skipped :]
        made = [y if self.aliased else fake_arrays.empty_like(y) for y in last]
        call("done_cuda", [None, *results], [None, *made], {"queue": self.queue}, self.stream)
        _overwrite(results[0])
        if not self.aliased:
            for y in results[1:]:
                _overwrite(y)
        return made

    def check(self, arrays: Sequence[Array], labels: Sequence[str], every: int = 1) -> None:
        attributes = {"queue": self.queue, "every": every, "name": "check", "counter": "state", "ordered": 1}
        texts = {"inside": "", "labels": "\n".join(labels), "what": "state", "advice": "look"}
        call("check_cuda", [None, *arrays], [None], attributes | texts, self.stream)

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return fake_arrays.empty(shape, dtype, self.device)


def _overwrite(x: Array) -> None:
    noise = np.full(x.shape, 99, x.dtype)
    fake_arrays.driver().fake_cuda_write(
        fake_arrays.current_stream(), x.address, noise.ctypes.data, noise.nbytes
    )
