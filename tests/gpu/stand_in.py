"""The stand-ins for the CUDA driver (tests/cpp/fake_cuda), NCCL (tests/cpp/fake_nccl) and NVRTC
(tests/cpp/fake_nvrtc), and of the first two for HIP and RCCL, compiled when a test first needs them.

They take the libraries' places in processes that have them loaded before: `environment()` has them load the
driver's, `with_nccl()` and `with_nvrtc()` another one besides.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.support import REPOSITORY

_SOURCES = REPOSITORY / "tests" / "cpp" / "fake_cuda"
_CORE = REPOSITORY / "core"
_LIBRARY = REPOSITORY / "build" / "fake-cuda" / "libcuda.so.1"
_NCCL_SOURCES = REPOSITORY / "tests" / "cpp" / "fake_nccl"
_NCCL = _LIBRARY.with_name("libnccl.so.2")
_NVRTC_SOURCES = REPOSITORY / "tests" / "cpp" / "fake_nvrtc"
_NVRTC = _LIBRARY.with_name("libnvrtc.so.12")
_HIP = _LIBRARY.with_name("libamdhip64.so.6")
_RCCL = _LIBRARY.with_name("librccl.so.1")

# Functions of HIP that are used, as ROCm's headers name them, and those of CUDA's driver that do the same.
HIP_NAMES = {
    "hipInit": "cuInit",
    "hipDriverGetVersion": "cuDriverGetVersion",
    "hipDrvGetErrorName": "cuGetErrorName",
    "hipDrvGetErrorString": "cuGetErrorString",
    "hipGetDeviceCount": "cuDeviceGetCount",
    "hipDeviceGet": "cuDeviceGet",
    "hipDeviceGetUuid": "cuDeviceGetUuid",
    "hipDeviceGetPCIBusId": "cuDeviceGetPCIBusId",
    "hipDeviceCanAccessPeer": "cuDeviceCanAccessPeer",
    "hipGetDevice": "",  # its own
    "hipSetDevice": "",
    "hipGetLastError": "",
    "hipThreadExchangeStreamCaptureMode": "cuThreadExchangeStreamCaptureMode",
    "hipDrvPointerGetAttributes": "cuPointerGetAttributes",
    "hipStreamCreateWithFlags": "cuStreamCreate",
    "hipStreamWaitEvent": "cuStreamWaitEvent",
    "hipStreamIsCapturing": "cuStreamIsCapturing",
    "hipEventCreateWithFlags": "cuEventCreate",
    "hipEventRecord": "cuEventRecord",
    "hipEventQuery": "cuEventQuery",
    "hipEventSynchronize": "cuEventSynchronize",
    "hipHostMalloc": "cuMemHostAlloc",
    "hipHostFree": "cuMemFreeHost",
    "hipMalloc": "cuMemAlloc_v2",
    "hipFree": "cuMemFree_v2",
    "hipMemcpyDtoHAsync": "cuMemcpyDtoHAsync_v2",
    "hipMemcpyHtoDAsync": "cuMemcpyHtoDAsync_v2",
    "hipMemcpyDtoDAsync": "cuMemcpyDtoDAsync_v2",
}


def why_not() -> str | None:
    """Why they cannot be had here; None: they can."""
    return None if shutil.which(_compiler()) else f"there is no C++ compiler ({_compiler()})"


def environment(options: str = "") -> dict[str, str]:
    """Variables of a process that has the driver's loaded; `options` as for FakeMachine::configure."""
    return {"LD_PRELOAD": str(library()), "FAKE_CUDA": options, "PYTHONPATH": python_path()}


def with_nccl(folder: Path) -> dict[str, str]:
    """The same, with NCCL's, which has its files in a folder."""
    return environment() | {"LD_PRELOAD": f"{library()} {nccl()}", "TMPDIR": str(folder)}


def with_nvrtc(options: str = "") -> dict[str, str]:
    """As `environment`, with NVRTC's, in a job that uses peer memory."""
    return environment(options) | {"LD_PRELOAD": f"{library()} {nvrtc()}", "MULTIRING_PEER_MEMORY": "1"}


def with_hip(folder: Path) -> dict[str, str]:
    """As `with_nccl`, of AMD's libraries."""
    preload = {"LD_PRELOAD": f"{hip()} {rccl()}", "FAKE_DRIVER": str(hip()), "TMPDIR": str(folder)}
    return environment() | preload


def python_path() -> str:
    """A PYTHONPATH with which scripts can import what tests have, besides what they can without."""
    return os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))


@functools.cache
def library() -> Path:
    """The driver's file, which is made where it is missing or older than its sources."""
    return _made(_LIBRARY, _SOURCES)


@functools.cache
def nccl() -> Path:
    """The same of NCCL."""
    return _made(_NCCL, _NCCL_SOURCES, library())


@functools.cache
def nvrtc() -> Path:
    """The same of NVRTC."""
    return _made(_NVRTC, _NVRTC_SOURCES)


@functools.cache
def hip() -> Path:
    """HIP's file: that of the driver, with other names besides."""
    names = (f"-Wl,--defsym={hip}={cuda}" for hip, cuda in HIP_NAMES.items() if cuda)
    return _made(_HIP, _SOURCES, options=("-DFAKE_HIP", *names))


@functools.cache
def rccl() -> Path:
    """RCCL's, which has NCCL's names."""
    return _made(_RCCL, _NCCL_SOURCES, hip())


def _made(target: Path, folder: Path, *libraries: Path, options: Sequence[str] = ()) -> Path:
    own = sorted(folder.glob("*.cpp"))
    headers = (each for name in ("device/*.h", "device/kernels/*", "base/*.h") for each in _CORE.glob(name))
    sources = [*folder.iterdir(), *_SOURCES.iterdir(), *headers, Path(__file__)]
    newest = max(path.stat().st_mtime for path in sources)
    if target.exists() and target.stat().st_mtime > newest:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.with_suffix(f".{os.getpid()}")  # another process may be doing the same
    command = [_compiler(), "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{target.name}"]
    command += ["-ffp-contract=off"]
    command += ["-I", str(_SOURCES.parent), "-I", str(_CORE)]
    command += [str(path) for path in (*own, *libraries)]
    command += options
    compiled = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr
    made.replace(target)
    return target


def _compiler() -> str:
    return os.environ.get("CXX", "c++")
