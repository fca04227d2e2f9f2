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
import chainer
from chainer import functions
from chainer.backends import cuda

from multiring import Communicator
from tests.adapters.chainer.support import Network, draw, make_model, make_optimizer
from tests.gpu.devices import library
from tests.on_ranks import same_everywhere

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


def train_as_the_host(
    comm: Communicator, copies: Callable[[], int], rtol: float = 0.0, **options: Any
) -> None:
    """Trains a model on the device and one on the host, and compares them. `copies`: so many to the host so
    far, to which gradients add none."""
    np.random.seed(1)
    x = np.random.default_rng(comm.rank).normal(size=(4, 6))
    with chainer.using_config("dtype", np.float64):
        host = chainer.Sequential(chainer.links.Linear(6, 200), chainer.links.Linear(200, 100))
    model = host.copy("copy")
    model.to_gpu()
    for each, given in ((model, placed(x)), (host, x)):
        optimizer = make_optimizer(
            communicator(comm),
            each,
            chainer.optimizers.MomentumSGD(0.05),
            **{"bucket_bytes": 1 << 20} | options,
        )
        for _ in range(5):
            before = copies()
            optimizer.backward(functions.mean(each(given) ** 2))
            copied = copies() - before
            optimizer.update()
        optimizer.close()
        assert copied == 0
    for (path, one), (_, two) in zip(model.namedparams(), host.namedparams(), strict=True):
        np.testing.assert_allclose(one.array.get(), two.array, rtol=rtol, err_msg=path)
        assert same_everywhere(comm, one.array.get().tobytes()), path
