"""A library that Chainer takes for CuPy, over the stand-in for the driver (tests/cpp/fake_cuda).

Its arrays are in fake_cupy_arrays.py; here are its functions, kernels and modules. Of elementwise kernels
those work whose C is Python, too.

Kept to what Chainer, ChainerMN and the tests ask for: it shows where arrays lie and what they are ordered
with, not how CuPy computes.
"""

from __future__ import annotations

import functools
import importlib.machinery
import re
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

import multiring
from tests.gpu import fake_arrays
from tests.gpu.fake_cupy_arrays import Device, Stream, get_current_stream, host, made, ndarray, stored


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
        values = {name: np.array(host(array)) for name, array in given.items()}
        exec(self._code, known, values)
        results = []
        for kind, name in self._outputs:
            value = np.asarray(values[name]).astype(kinds[kind] if kind in kinds else np.dtype(kind))
            results.append(stored(value, given.get(name)))
        return results[0] if len(results) == 1 else tuple(results)


def _rsqrt(x: Any) -> Any:
    return 1 / np.sqrt(x)


def _unsupported(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("the stand-in for CuPy compiles no kernels")


def _created(name: str) -> Callable[..., ndarray]:
    """A function that makes an array of none."""
    return lambda *args, **options: made(getattr(np, name)(*args, **options))


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
    return made(np.asarray(x, dtype))


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
            return stored(found(*map(host, args), **options), out)

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
    _module("cupyx", rsqrt=lambda x, **_: made(_rsqrt(x._values())), zeros_pinned=np.zeros)
    for name in ("cupyx.scipy", "cupyx.scipy.linalg", "cupyx.scipy.special"):
        _module(name)
