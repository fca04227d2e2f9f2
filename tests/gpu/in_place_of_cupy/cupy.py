"""Is CuPy for programs that have this folder on their path: a stand-in (../fake_cupy.py)."""

import sys

from tests.gpu import fake_cupy

del sys.modules["cupy"]
fake_cupy.install()
