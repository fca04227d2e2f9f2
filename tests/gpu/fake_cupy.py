"""A library that Chainer takes for CuPy, over the stand-in for the driver (tests/cpp/fake_cuda).

Its arrays lie in the stand-in's device memory. What is computed with them is computed by NumPy from what the
current stream has made, and written when that stream gets there. As with CuPy, nothing turns one into an
array of NumPy but `get`, and the two do not mix. Of elementwise kernels those work whose C is Python, too.

Kept to what Chainer, ChainerMN and the tests ask for: it shows where arrays lie and what they are ordered
with, not how CuPy computes.
"""

from __future__ import annotations

import functools
import importlib.machinery
import operator
import os
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any

import numpy as np

import multiring
from tests.gpu import fake_arrays

_ARITHMETIC = (
    "__add__",
    "__sub__",
    "__mul__",
    "__truediv__",
    "__floordiv__",
    "__pow__",
    "__mod__",
    "__matmul__",
)
_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__and__", "__or__", "__xor__")
_METHODS = (
    *("sum", "mean", "var", "max", "min", "prod", "dot", "any", "all", "argmax", "clip", "repeat", "take"),
    *("cumsum", "conj", "round", "std", "argsort"),
)


class Device:
    """The device of this number, or the current one."""

    def __init__(self, number: int | Device | None = None) -> None:
        self.id = 0 if number is None else int(number)

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None: ...

    def use(self) -> None: ...

    def synchronize(self) -> None:
        get_current_stream().synchronize()

    @property
    def pci_bus_id(self) -> str:
        """As if each rank had a device of its own."""
        return f"0000:{self.id:02x}:0{os.environ.get('MULTIRING_RANK', '0')}.0"


class Stream:
    """A stream, the current one in a `with` block. Streams do not wait for the default one."""

    null: Stream

    def __init__(self, null: bool = False, non_blocking: bool = False, *, ptr: int | None = None) -> None:
        self.ptr = fake_arrays.driver().fake_cuda_stream(0) if ptr is None else ptr
        self._before: list[int] = []

    def __enter__(self) -> Stream:
        self._before.append(fake_arrays.use_stream(self.ptr))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        fake_arrays.use_stream(self._before.pop())

    def synchronize(self) -> None:
        word = np.empty(1, np.uint8)
        assert not fake_arrays.driver().fake_cuda_read(self.ptr, word.ctypes.data, _word().address, 1)


@functools.cache
def _word() -> fake_arrays.Array:
    return fake_arrays.array(np.zeros(1, np.uint8))


def get_current_stream() -> Stream:
    return Stream(ptr=fake_arrays.current_stream())


class ndarray(fake_arrays.Array):  # noqa: N801 (the name is CuPy's)
    """An array on a device."""

    __module__ = "cupy"
    __array_priority__ = 100.0

    def __init__(self, layout: np.ndarray[Any, Any], owner: object) -> None:
        super().__init__(layout, owner)
        self.flags.f_contiguous = layout.flags.f_contiguous
        self.ndim, self.size, self.nbytes = layout.ndim, layout.size, layout.nbytes
        self.itemsize, self.strides = layout.itemsize, layout.strides

    @property
    def data(self) -> SimpleNamespace:
        return SimpleNamespace(ptr=self.address)

    @property
    def device(self) -> Device:
        return Device(getattr(self._owner, "device", 0))

    @property
    def T(self) -> ndarray:  # noqa: N802
        return self.transpose()

    @property
    def real(self) -> ndarray:
        return self

    def __array__(self, *_: object, **__: object) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **options: Any) -> Any:
        found = getattr(ufunc, method)(*map(_host, inputs), **options)
        return _stored(found, out[0] if out else None)

    def __array_function__(self, function: Any, _: Any, args: Any, kwargs: Any) -> Any:
        return getattr(sys.modules["cupy"], function.__name__)(*args, **kwargs)

    def get(
        self, stream: Stream | None = None, order: str = "C", out: Any = None, blocking: bool = True
    ) -> np.ndarray[Any, Any]:
        if out is None:
            return self._values()
        out[...] = self._values()
        return out  # type: ignore[no-any-return]

    def _values(self) -> np.ndarray[Any, Any]:
        """For what is computed here, as a kernel reads them."""
        return super().get()

    def set(self, values: np.ndarray[Any, Any]) -> None:
        self[...] = _made(values)

    def item(self) -> Any:
        return self._values().item()

    def tolist(self) -> Any:
        return self._values().tolist()

    def __len__(self) -> int:
        return len(self._layout)

    def __iter__(self) -> Iterator[ndarray]:
        return (self[index] for index in range(len(self)))

    def __bool__(self) -> bool:
        return bool(self._values())

    def __int__(self) -> int:
        return int(self._values())

    def __float__(self) -> float:
        return float(self._values())

    def __repr__(self) -> str:
        return f"cupy {self._values()!r}"

    def __reduce__(self) -> Any:
        return _made, (self._values(),)

    def __deepcopy__(self, _: Any) -> ndarray:
        return self.copy()

    def __neg__(self) -> ndarray:
        return _made(-self._values())

    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self, key: Any) -> ndarray:
        parts = key if isinstance(key, tuple) else (key,)
        if any(isinstance(part, list | np.ndarray | ndarray) for part in parts):
            return _made(self._values()[tuple(map(_host, parts))])
        # With an ellipsis there is a view of one element, too, which NumPy would look at otherwise.
        return self._seen(self._layout[parts if Ellipsis in parts else (*parts, ...)])

    def __setitem__(self, key: Any, values: Any) -> None:
        target = self[key]
        source = values if isinstance(values, ndarray) else _made(np.asarray(_host(values), self.dtype))
        source = source.astype(self.dtype, copy=False)
        while source.ndim > target.ndim:
            source = source[0]
        fake_arrays.copy(target, self._seen(np.broadcast_to(source._layout, target.shape), source._owner))

    def astype(self, dtype: Any, order: str = "K", copy: bool = True) -> ndarray:
        if not copy and self.dtype == np.dtype(dtype):
            return self
        return _made(self._values().astype(dtype))

    def copy(self, order: str = "C") -> ndarray:
        return _made(self._values())

    def fill(self, value: Any) -> None:
        self[...] = value

    def view(self, dtype: Any = None) -> ndarray:
        return self._seen(self._layout if dtype is None else self._layout.view(dtype))

    def reshape(self, *shape: Any, order: str = "C") -> ndarray:
        whole = self if self.flags.c_contiguous else self.copy()
        return whole._seen(whole._layout.reshape(*shape), whole._owner)

    def ravel(self) -> ndarray:
        return self.reshape(-1)

    def flatten(self) -> ndarray:
        return self.reshape(-1).copy()

    def transpose(self, *axes: Any) -> ndarray:
        return self._seen(self._layout.transpose(*axes))

    def squeeze(self, axis: Any = None) -> ndarray:
        return self._seen(self._layout.squeeze(axis))

    def swapaxes(self, one: int, two: int) -> ndarray:
        return self._seen(self._layout.swapaxes(one, two))

    def _seen(self, layout: np.ndarray[Any, Any], owner: object = None) -> ndarray:
        return ndarray(layout, owner or self._owner)


def _define_methods() -> None:
    def forward(name: str) -> Callable[..., Any]:
        def method(self: ndarray, *args: Any, out: Any = None, **options: Any) -> Any:
            found = getattr(self._values(), name)(*map(_host, args), **options)
            return found if found is NotImplemented else _stored(found, out)

        return method

    def in_place(name: str) -> Callable[..., Any]:
        calculate = getattr(operator, name)

        def method(self: ndarray, other: Any) -> ndarray:
            self[...] = _made(calculate(self._values(), _host(other)))
            return self

        return method

    for name in _ARITHMETIC:
        setattr(ndarray, name, forward(name))
        setattr(ndarray, f"__r{name[2:]}", forward(f"__r{name[2:]}"))
        setattr(ndarray, f"__i{name[2:]}", in_place(f"__i{name[2:]}"))
    for name in (*_COMPARISONS, "__abs__", "__invert__", *_METHODS):
        setattr(ndarray, name, forward(name))


_define_methods()
Stream.null = Stream(ptr=1)


def _made(values: Any) -> ndarray:
    values = np.asarray(values)
    memory = fake_arrays.array(np.ascontiguousarray(values))
    return ndarray(memory._layout.reshape(values.shape), memory._owner)


def _host(x: Any) -> Any:
    """What NumPy computes with in the place of an argument."""
    if isinstance(x, ndarray):
        return x._values()
    if isinstance(x, np.ndarray) and x.ndim:
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    return type(x)(map(_host, x)) if type(x) in (list, tuple) else x


def _stored(found: Any, out: ndarray | None) -> Any:
    """What NumPy has computed, on the device."""
    if isinstance(found, list | tuple):
        return type(found)(_stored(each, None) for each in found)
    if not isinstance(found, np.ndarray | np.generic):
        return found
    if out is None:
        return _made(found)
    out[...] = _made(found)
    return out


class ElementwiseKernel:
    """A kernel whose statements mean in Python what they mean in C."""

    def __init__(self, inputs: str, outputs: str, operation: str, name: str, **_: Any) -> None:
        self._inputs, self._outputs = (
            [part.split()[-2:] for part in text.split(",") if part.strip()] for text in (inputs, outputs)
        )
        lines = [re.sub(r"\s+", " ", line).strip() for line in operation.split(";")]
        # A declaration of a variable is its assignment.
        lines = [re.sub(r"^(?:const )?(?:T|float|double|U) (\w+ =)", r"\1", line) for line in lines]
        self._code = "\n".join(filter(None, lines))

    def __call__(self, *arrays: Any, size: int | None = None, **_: Any) -> Any:
        names = [*self._inputs, *self._outputs]
        given = dict(zip((name for _, name in names), arrays, strict=False))
        kinds = {
            kind: array.dtype
            for (kind, _), array in zip(names, arrays, strict=False)
            if isinstance(array, ndarray)
        }
        known = {name: getattr(np, name) for name in ("exp", "tanh", "sqrt", "log", "cosh")}
        known |= {"pow": np.power, "max": np.maximum, "min": np.minimum, "abs": np.abs, "rsqrt": _rsqrt}
        values = {name: np.array(_host(array)) for name, array in given.items()}
        exec(self._code, known, values)
        results = []
        for kind, name in self._outputs:
            value = np.asarray(values[name]).astype(kinds[kind] if kind in kinds else np.dtype(kind))
            results.append(_stored(value, given.get(name)))
        return results[0] if len(results) == 1 else tuple(results)


def _rsqrt(x: Any) -> Any:
    return 1 / np.sqrt(x)


def _unsupported(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("the stand-in for CuPy compiles no kernels")


def _created(name: str) -> Callable[..., ndarray]:
    """A function that makes an array of none."""
    return lambda *args, **options: _made(getattr(np, name)(*args, **options))


def _empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    shape = shape if isinstance(shape, tuple) else (shape,)
    memory = fake_arrays.empty(shape, dtype)
    return ndarray(memory._layout, memory._owner)


def _like(value: float | None) -> Callable[..., ndarray]:
    def make(x: Any, dtype: Any = None, **_: Any) -> ndarray:
        made = _empty(tuple(x.shape), dtype or x.dtype)
        if value is not None:
            made[...] = value
        return made

    return make


def _asarray(x: Any, dtype: Any = None, order: str = "C") -> ndarray:
    if isinstance(x, ndarray):
        return x if dtype is None else x.astype(dtype, copy=False)
    return _made(np.asarray(x, dtype))


def _array(x: Any, dtype: Any = None, copy: bool = True, **_: Any) -> ndarray:
    made = _asarray(x, dtype)
    return made.copy() if made is x and copy else made


def _from_dlpack(result: Any) -> ndarray:
    memory = fake_arrays.from_dlpack(result)
    return ndarray(memory._layout, memory._owner)


def _memoize(for_each_device: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return functools.cache


class _Module(ModuleType):
    """The package: what it does not define is NumPy's function of that name, of arrays on the device."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name) if not name.startswith("_") else None
        if found is None:
            raise AttributeError(name)
        if isinstance(found, type) or not callable(found):
            return found

        def function(*args: Any, out: Any = None, **options: Any) -> Any:
            return _stored(found(*map(_host, args), **options), out)

        return function


class NcclCommunicator:
    """CuPy's names for NCCL, for one float32 allreduce; the ranks are those of multiring's world."""

    def __init__(self, size: int, unique: tuple[int, ...], rank: int) -> None:
        assert unique == (1, 2, 3)
        self._comm = multiring.world()
        assert (size, rank) == (self._comm.size, self._comm.rank)

    def allReduce(  # noqa: N802
        self, source: int, to: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        assert (source, dtype, op, stream) == (to, 7, 0, fake_arrays.current_stream())
        x = ndarray(fake_arrays.layout(to, (count,), np.float32), self)
        self._comm.allreduce(x, out=x)


def _module(name: str, **contents: Any) -> ModuleType:
    made = _Module(name) if name == "cupy" else ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    made.__path__ = []
    vars(made).update(contents)
    sys.modules[name] = made
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, made)
    return made


def install() -> None:
    """Put it in the place of CuPy, in a process that has loaded the stand-in and has not imported Chainer."""
    if "cupy" in sys.modules:
        assert sys.modules["cupy"].ndarray is ndarray
        return
    pool = SimpleNamespace(free_all_blocks=lambda: None)
    _module(
        "cupy",
        __version__="14.2.0",
        ndarray=ndarray,
        empty=_empty,
        empty_like=_like(None),
        zeros_like=_like(0),
        ones_like=_like(1),
        **{name: _created(name) for name in ("zeros", "ones", "full", "arange", "eye", "linspace")},
        asarray=_asarray,
        array=_array,
        ascontiguousarray=lambda x: _asarray(x) if _asarray(x).flags.c_contiguous else _asarray(x).copy(),
        asnumpy=lambda x: x.get(),
        from_dlpack=_from_dlpack,
        get_array_module=lambda *xs: sys.modules["cupy"] if any(isinstance(x, ndarray) for x in xs) else np,
        get_default_memory_pool=lambda: pool,
        get_default_pinned_memory_pool=lambda: pool,
        ElementwiseKernel=ElementwiseKernel,
        ReductionKernel=_unsupported,
        RawKernel=_unsupported,
        memoize=_memoize,
        clear_memo=lambda: None,
        fuse=lambda *args, **_: args[0] if args else lambda function: function,
    )
    _module("cupy._util", PerformanceWarning=type("PerformanceWarning", (Warning,), {}))
    _module(
        "cupy.cuda",
        Device=Device,
        Stream=Stream,
        Event=type("Event", (), {}),
        get_current_stream=get_current_stream,
        runtime=SimpleNamespace(
            getDeviceCount=lambda: 1, getDeviceProperties=lambda number: {"name": b"stand-in"}
        ),
    )
    _module("cupy.cuda.cublas")
    _module(
        "cupy.cuda.nccl",
        available=True,
        NCCL_FLOAT32=7,
        NCCL_SUM=0,
        get_unique_id=lambda: (1, 2, 3),
        NcclCommunicator=NcclCommunicator,
    )
    _module("cupyx", rsqrt=lambda x, **_: _made(_rsqrt(x._values())), zeros_pinned=np.zeros)
    for name in ("cupyx.scipy", "cupyx.scipy.linalg", "cupyx.scipy.special"):
        _module(name)
