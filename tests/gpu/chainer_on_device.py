"""What tests of Chainer on a device share. They run on CuPy where it sees a device, and everywhere on the
stand-in for it (fake_cupy.py)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.gpu import fake_cupy

if importlib.util.find_spec("chainer") is None:
    pytest.skip("Chainer is not installed: it needs Python 3.11 or older", allow_module_level=True)
if "FAKE_CUDA" in os.environ:  # in a rank of a test on the stand-in
    fake_cupy.install()

import multiring.chainer

# isort: split
from chainer import functions
from chainer.backends import cuda

from tests.adapters.chainer.support import Network, draw, make_model
from tests.gpu.devices import library

LIBRARIES = pytest.mark.parametrize("name", ["cupy", "fake"])


def placed(values: Any) -> Any:
    """An array on the device."""
    return cuda.cupy.asarray(np.asarray(values))


def assert_placed(found: Any, wanted: Any, rtol: float = 0.0) -> None:
    """Fails unless `found` is an array on the device with these values and their dtype."""
    wanted = np.asarray(wanted)
    assert isinstance(found, cuda.ndarray), type(found)
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(found.get(), wanted, rtol=rtol)


def on_stream(name: str, call: Callable[[], Any]) -> Any:
    """What `call` returns, with a stream of its own as the current one, which has work to do first. All of it
    is done then: another stream may read it."""
    on = library(name)
    with on.stream():
        on.busy()
        result = call()
        cuda.cupy.cuda.get_current_stream().synchronize()
    return result


def model_on_device(seed: int = 0) -> Network:
    model = make_model(seed)
    model.to_gpu()
    return model


def loss_of(model: Any, rank: int, **options: Any) -> Any:
    """Of inputs that lie where the parameters do."""
    x = draw(rank)
    return functions.mean(model(placed(x) if on_device(model) else x, **options) ** 2)


def on_device(model: Any) -> bool:
    return isinstance(model.first.W.array, cuda.ndarray)


def communicator(comm: Any, **options: Any) -> Any:
    return multiring.chainer.create_communicator(comm, **options)
