"""Arrays, devices and streams of a library that Chainer takes for CuPy (fake_cupy.py).

The arrays lie in the stand-in's device memory. What is computed with them is computed by NumPy from what the
current stream has made, and written when that stream gets there. As with CuPy, nothing turns one into an
array of NumPy but `get`, and the two do not mix.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace, TracebackType
from typing import Any

import numpy as np

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
        found = getattr(ufunc, method)(*map(host, inputs), **options)
        return stored(found, out[0] if out else None)

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
        self[...] = made(values)

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
        return made, (self._values(),)

    def __deepcopy__(self, _: Any) -> ndarray:
        return self.copy()

    def __neg__(self) -> ndarray:
        return made(-self._values())

    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self, key: Any) -> ndarray:
        parts = key if isinstance(key, tuple) else (key,)
        if any(isinstance(part, list | np.ndarray | ndarray) for part in parts):
            return made(self._values()[tuple(map(host, parts))])
        # With an ellipsis there is a view of one element, too, which NumPy would look at otherwise.
        return self._seen(self._layout[parts if Ellipsis in parts else (*parts, ...)])

    def __setitem__(self, key: Any, values: Any) -> None:
        target = self[key]
        source = values if isinstance(values, ndarray) else made(np.asarray(host(values), self.dtype))
        source = source.astype(self.dtype, copy=False)
        while source.ndim > target.ndim:
            source = source[0]
        fake_arrays.copy(target, self._seen(np.broadcast_to(source._layout, target.shape), source._owner))

    def astype(self, dtype: Any, order: str = "K", copy: bool = True) -> ndarray:
        if not copy and self.dtype == np.dtype(dtype):
            return self
        return made(self._values().astype(dtype))

    def copy(self, order: str = "C") -> ndarray:
        return made(self._values())

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
            found = getattr(self._values(), name)(*map(host, args), **options)
            return found if found is NotImplemented else stored(found, out)

        return method

    def in_place(name: str) -> Callable[..., Any]:
        calculate = getattr(operator, name)

        def method(self: ndarray, other: Any) -> ndarray:
            self[...] = made(calculate(self._values(), host(other)))
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


def made(values: Any) -> ndarray:
    values = np.asarray(values)
    memory = fake_arrays.array(np.ascontiguousarray(values))
    return ndarray(memory._layout.reshape(values.shape), memory._owner)


def host(x: Any) -> Any:
    """What NumPy computes with in the place of an argument."""
    if isinstance(x, ndarray):
        return x._values()
    if isinstance(x, np.ndarray) and x.ndim:
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    return type(x)(map(host, x)) if type(x) in (list, tuple) else x


def stored(found: Any, out: ndarray | None) -> Any:
    """What NumPy has computed, on the device."""
    if isinstance(found, list | tuple):
        return type(found)(stored(each, None) for each in found)
    if not isinstance(found, np.ndarray | np.generic):
        return found
    if out is None:
        return made(found)
    out[...] = made(found)
    return out
