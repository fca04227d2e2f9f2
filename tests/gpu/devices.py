"""The libraries whose arrays lie on a device: what the tests of one do with them, by one name each."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.gpu import fake_arrays, stand_in
from tests.python.collectives.array_kinds import ArrayKind
from tests.python.collectives.oracle import DTYPES, Bits

# About a tenth of a second on a processor of 1 to 2 GHz.
_BUSY_CYCLES = 150_000_000


_COUNTS: dict[str, Callable[[Any], int]] = {
    "cupy": lambda cupy: int(cupy.cuda.runtime.getDeviceCount()),
    "torch": lambda torch: int(torch.cuda.device_count()),
    "jax": lambda jax: sum(device.platform == "gpu" for device in jax.devices()),
}


def why_not(library: str) -> str | None:
    """Why arrays of a library cannot be tried here; None: they can. "fake": those of the stand-in;
    "cpu": Torch's on the CPU."""
    if library == "fake":
        return stand_in.why_not()
    if library == "cpu":
        return None
    try:
        module = importlib.import_module(library)
    except ImportError as error:
        return f"{library} is not installed: {error}"
    try:
        count = _COUNTS[library](module)
    except Exception as error:
        return f"{library} sees no device: {error}"
    return None if count else f"{library} sees no device"


@dataclass(frozen=True)
class Library:
    """One library: `full` makes a float32 array, `stream` a stream that does not wait for the default one,
    `busy` gives the current stream work that takes a while (a tenth of a second on a GPU), `copy_to_host`
    waits for it."""

    full: Callable[[int, float], Any]
    stream: Callable[[], AbstractContextManager[Any]]
    busy: Callable[[], None]
    copy_to_host: Callable[[Any], np.ndarray[Any, Any]]


def _cupy_busy() -> None:
    cupy = importlib.import_module("cupy")
    source = (
        'extern "C" __global__ void busy(long long n) { long long t = clock64() + n; while (clock64() < t); }'
    )
    cupy.RawKernel(source, "busy")((1,), (1,), (np.int64(_BUSY_CYCLES),))


def _torch() -> Library:
    torch = importlib.import_module("torch")
    return Library(
        full=lambda count, value: torch.full((count,), value, dtype=torch.float32, device="cuda"),
        stream=lambda: torch.cuda.stream(torch.cuda.Stream()),
        busy=lambda: torch.cuda._sleep(_BUSY_CYCLES),
        copy_to_host=lambda x: x.cpu().numpy(),
    )


def _cupy() -> Library:
    cupy = importlib.import_module("cupy")
    return Library(
        full=lambda count, value: cupy.full(count, value, "float32"),
        stream=lambda: cupy.cuda.Stream(non_blocking=True),
        busy=_cupy_busy,
        copy_to_host=lambda x: x.get(),
    )


def _fake() -> Library:
    return Library(fake_arrays.full, fake_arrays.stream, fake_arrays.busy, lambda x: x.get())


def library(name: str) -> Library:
    """A library by its name; it is imported where this is called."""
    return {"torch": _torch, "cupy": _cupy, "fake": _fake}[name]()


def _fake_strided(bits: Bits, _: str) -> Any:
    return fake_arrays.array(np.repeat(bits, 3, -1))[..., 1::3]


def _fake_by_dlpack(bits: Bits, _: str) -> Any:
    return fake_arrays.DlpackArray(fake_arrays.array(bits))


def _cupy_array(bits: Bits, _: str) -> Any:
    return importlib.import_module("cupy").array(bits)


def _cupy_strided(bits: Bits, _: str) -> Any:
    return importlib.import_module("cupy").array(np.repeat(bits, 3, -1))[..., 1::3]


def _cuda_tensor(bits: Bits, dtype: str) -> Any:
    torch = importlib.import_module("torch")
    if dtype == "bfloat16":
        return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16).cuda()
    return torch.from_numpy(bits.copy()).cuda()


def _strided_cuda_tensor(bits: Bits, dtype: str) -> Any:
    return _cuda_tensor(np.repeat(bits, 2, -1), dtype)[..., ::2]


def _pinned_tensor(bits: Bits, dtype: str) -> Any:
    return _cuda_tensor(bits, dtype).cpu().pin_memory()


_NUMPY_DTYPES = tuple(dtype for dtype in DTYPES if dtype != "bfloat16")

KINDS = {
    kind.name: kind
    for kind in (
        ArrayKind("cupy", _cupy_array, _NUMPY_DTYPES, "cupy.ndarray"),
        ArrayKind("cupy strided", _cupy_strided, _NUMPY_DTYPES, "cupy.ndarray"),
        ArrayKind("fake", lambda bits, _: fake_arrays.array(bits), _NUMPY_DTYPES, "fake_arrays.Array"),
        ArrayKind("fake strided", _fake_strided, _NUMPY_DTYPES, "fake_arrays.Array"),
        ArrayKind("fake by DLPack", _fake_by_dlpack, _NUMPY_DTYPES, "fake_arrays.Array"),
        ArrayKind("torch cuda", _cuda_tensor, DTYPES, "torch.Tensor"),
        ArrayKind("torch cuda strided", _strided_cuda_tensor, DTYPES, "torch.Tensor"),
        ArrayKind("torch pinned", _pinned_tensor, DTYPES, "torch.Tensor"),
    )
}
