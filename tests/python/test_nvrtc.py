"""NVRTC, which needs no GPU, compiles the kernels of peer memory for several generations of devices."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import re

import pytest

from tests.support import REPOSITORY

_WHEEL = "nvidia-cuda-nvrtc-cu12"
_CORE = REPOSITORY / "core" / "device"
_SOURCE = _CORE / "kernels" / "reduce.inc"
_DTYPES = range(13)
_FLOAT32, _FLOAT64, _FLOAT16, _INT64 = 11, 12, 9, 7


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        files = importlib.metadata.files(_WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{_WHEEL} is not installed: the wheel has 90 MB")
    path = next(file.locate() for file in files if file.name == "libnvrtc.so.12")
    return ctypes.CDLL(str(path))


def _options() -> list[str]:
    """Those that the library gives NVRTC, but for the device and the dtype."""
    return re.findall(r'"(--(?!gpu-architecture)[^"]+)"', (_CORE / "peer_kernels.cpp").read_text())


def _compiled(architecture: str, dtype: int, what: str) -> bytes:
    """The machine code ("CUBIN"), or the assembler text ("PTX") of a kernel."""
    library, program, size = _library(), ctypes.c_void_p(), ctypes.c_size_t()
    options = [f"--gpu-architecture={architecture}", *_options(), f"-DMULTIRING_DTYPE={dtype}"]
    texts = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    source = _SOURCE.read_bytes()
    assert library.nvrtcCreateProgram(ctypes.byref(program), source, b"reduce.cu", 0, None, None) == 0
    failed = library.nvrtcCompileProgram(program, len(options), texts)
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    assert not failed, log.value.decode()
    assert not log.value, "a warning: " + log.value.decode()
    assert getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
    image = ctypes.create_string_buffer(size.value)
    assert getattr(library, f"nvrtcGet{what}")(program, image) == 0
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return image.raw


@pytest.mark.parametrize("dtype", _DTYPES)
def test_every_dtype(dtype: int) -> None:
    assert b"multiring_reduce" in _compiled("sm_90", dtype, "CUBIN")


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_100"])
def test_every_generation(architecture: str) -> None:
    for dtype in (_INT64, _FLOAT16, _FLOAT32, _FLOAT64):
        assert b"multiring_reduce" in _compiled(architecture, dtype, "CUBIN")


@pytest.mark.parametrize("dtype", [_FLOAT16, _FLOAT32, _FLOAT64])
def test_operations_are_those_of_the_host(dtype: int) -> None:
    """None is fused, none takes denormals for zero, and none is an approximation."""
    assert _options() == ["--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true"]
    text = _compiled("compute_90", dtype, "PTX").decode()
    operations = set(re.findall(r"\b((?:add|mul|sub|div|fma|rcp|mad)\.\S+)", text))
    floating = {each for each in operations if re.search(r"\.f(16|32|64)", each)}
    assert floating
    assert not [
        each for each in floating if not re.fullmatch(r"(add|mul|div|sub|rcp)\.rn\.f(32|64)", each)
    ], floating
