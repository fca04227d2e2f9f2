"""The stand-in for the CUDA driver (tests/cpp/fake_cuda), compiled when a test first needs it.

It takes the driver's place in processes that have it loaded before: `environment()` has them load it.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

from tests.support import REPOSITORY

_SOURCES = REPOSITORY / "tests" / "cpp" / "fake_cuda"
_CORE = REPOSITORY / "core"
_LIBRARY = REPOSITORY / "build" / "fake-cuda" / "libcuda.so.1"


def why_not() -> str | None:
    """Why it cannot be had here; None: it can."""
    return None if shutil.which(_compiler()) else f"there is no C++ compiler ({_compiler()})"


def environment(options: str = "") -> dict[str, str]:
    """Variables of a process that has it loaded; `options` as for FakeMachine::configure."""
    return {"LD_PRELOAD": str(library()), "FAKE_CUDA": options, "PYTHONPATH": python_path()}


def python_path() -> str:
    """A PYTHONPATH with which scripts can import what tests have, besides what they can without."""
    return os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))


@functools.cache
def library() -> Path:
    """Its file, which is made where it is missing or older than its sources."""
    sources = [*sorted(_SOURCES.iterdir()), *_CORE.glob("device/*.h"), *_CORE.glob("base/*.h")]
    newest = max(path.stat().st_mtime for path in sources)
    if _LIBRARY.exists() and _LIBRARY.stat().st_mtime > newest:
        return _LIBRARY
    _LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    made = _LIBRARY.with_suffix(f".{os.getpid()}")  # another process may be doing the same
    command = [_compiler(), "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-Wl,-soname,libcuda.so.1"]
    command += ["-I", str(_SOURCES.parent), "-I", str(_CORE)]
    command += [str(path) for path in sources if path.suffix == ".cpp"]
    compiled = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr
    made.replace(_LIBRARY)
    return _LIBRARY


def _compiler() -> str:
    return os.environ.get("CXX", "c++")
