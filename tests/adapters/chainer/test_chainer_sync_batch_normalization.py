"""Synchronised batch normalisation of Chainer against Chainer's own on the whole batch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from multiring.chainer import SyncBatchNormalization, convert_sync_batch_normalization  # before Chainer

# isort: split
import chainer
from chainer import functions, links

from multiring import Communicator
from multiring.errors import MismatchError, UsageError
from tests.on_ranks import all_raise, on_ranks, refuses, same_everywhere

Array = NDArray[Any]

PARTS = {1: [[5], [4]], 3: [[2, 1, 4], [0, 3, 0]]}
TIGHT = {"float64": {"rtol": 1e-10, "atol": 1e-12}, "float32": {"rtol": 2e-4, "atol": 2e-5}}


def whole_batch(seed: int, samples: int, shape: tuple[int, ...], dtype: str) -> Array:
    values = np.random.default_rng(seed).standard_normal((samples, *shape)) * 3 + 5
    return np.asarray(values, dtype)


def cube(y: Any, samples: Array) -> Any:
    """A loss whose gradient differs from sample to sample."""
    weights = np.sin(samples).reshape(-1, *([1] * (y.ndim - 1))).astype(y.dtype)
    return functions.sum(y**3 * functions.broadcast_to(chainer.Variable(weights), y.shape))


@on_ranks(1, 3)
@pytest.mark.parametrize(("dtype", "shape"), [("float64", (3,)), ("float32", (2, 2, 1, 2))])
def test_ranks_normalise_like_one(comm: Communicator, dtype: str, shape: tuple[int, ...]) -> None:
    with chainer.using_config("dtype", np.dtype(dtype)):
        layer = SyncBatchNormalization(shape[0], comm, decay=0.7, eps=1e-3)
        single = links.BatchNormalization(shape[0], decay=0.7, eps=1e-3)
    for step, parts in enumerate(PARTS[comm.size] * 2):
        start = sum(parts[: comm.rank])
        mine = slice(start, start + parts[comm.rank])
        batch = whole_batch(step, sum(parts), shape, dtype)
        samples = np.arange(len(batch), dtype=dtype)
        x, everything = chainer.Variable(batch[mine]), chainer.Variable(batch)
        for one in (layer, single):
            one.cleargrads()
        y, wanted = layer(x), single(everything)
        assert (y.dtype, y.shape) == (dtype, x.shape)
        cube(y, samples[mine]).backward()
        cube(wanted, samples).backward()
        tolerance = TIGHT[dtype]
        np.testing.assert_allclose(y.array, wanted.array[mine], **tolerance)
        scale = np.abs(everything.grad).max()
        np.testing.assert_allclose(x.grad / scale, everything.grad[mine] / scale, **tolerance)
        for name in ("gamma", "beta"):
            total = comm.allreduce(np.asarray(getattr(layer, name).grad, np.float64))
            np.testing.assert_allclose(
                total, getattr(single, name).grad, rtol=tolerance["rtol"] * 10, atol=1e-3
            )
        for name in ("avg_mean", "avg_var"):
            found = getattr(layer, name)
            np.testing.assert_allclose(found, getattr(single, name), **tolerance)
            assert same_everywhere(comm, found.tobytes())
    with chainer.using_config("train", False):
        batch = whole_batch(99, 2, shape, dtype)
        np.testing.assert_allclose(layer(batch).array, single(batch).array, **TIGHT[dtype])


def test_large_means(comm: Communicator) -> None:
    """The variance keeps its digits where the mean is thousands of times the deviation."""
    layer = SyncBatchNormalization(2, comm)
    batch = (whole_batch(0, 64, (2, 4, 4), "float64") + 10000.0).astype(np.float32)
    layer(np.array_split(batch, comm.size)[comm.rank])
    unbiased = batch.astype(np.float64).var(axis=(0, 2, 3), ddof=1)
    np.testing.assert_allclose((layer.avg_var - 0.9) / 0.1, unbiased, rtol=1e-4)


def test_half_precision(comm: Communicator) -> None:
    with chainer.using_config("dtype", chainer.mixed16):
        layer = SyncBatchNormalization(3, comm)
    x = chainer.Variable(whole_batch(comm.rank, 4, (3, 2), "float16"))
    y = layer(x)
    functions.sum(y * y * y).backward()
    assert (y.dtype, x.grad.dtype, layer.gamma.grad.dtype, layer.avg_var.dtype) == ("f2", "f2", "f4", "f4")


def test_other_forms(comm: Communicator) -> None:
    """Without gamma or beta, without a size, fine-tuning, recomputation."""
    batch = whole_batch(comm.rank, 4, (3, 2), "float32")
    plain = SyncBatchNormalization(3, comm, use_gamma=False, use_beta=False)
    lazy = SyncBatchNormalization(comm=comm)
    assert lazy.avg_mean is None
    np.testing.assert_allclose(plain(batch).array, lazy(batch).array, rtol=1e-5, atol=1e-6)
    total = comm.allreduce(plain(batch).array.sum(axis=(0, 2)))
    np.testing.assert_allclose(total, 0.0, atol=1e-4)
    before = plain.avg_mean.copy()
    with chainer.using_config("in_recomputing", True):
        plain(batch)
    np.testing.assert_array_equal(plain.avg_mean, before)
    for k in range(2):
        plain(batch, finetune=True)
        assert k + 1 == plain.N
    means = comm.allgather(batch.mean(axis=(0, 2))[None])
    np.testing.assert_allclose(plain.avg_mean, means.mean(axis=0), rtol=1e-5)


def test_refused(comm: Communicator) -> None:
    layer = SyncBatchNormalization(3, comm)
    shape = r"input has shape \(2, 4\); expected \(batch, 3, \.\.\.\)"
    refuses(UsageError, shape, layer, np.zeros((2, 4), np.float32))
    one_value = np.zeros((1 if comm.rank == 0 else 0, 3), np.float32)
    refuses(UsageError, "one value per channel on all ranks has no variance", layer, one_value)
    refuses(UsageError, "normalises per channel", SyncBatchNormalization, (3, 2), comm)
    refuses(UsageError, "normalises per channel", SyncBatchNormalization, 3, comm, axis=(0, 2))
    own_axes = links.BatchNormalization((3, 2))
    refuses(UsageError, "over axes of its own", convert_sync_batch_normalization, own_axes, comm)
    more = chainer.Sequential(links.BatchRenormalization(3))
    refuses(UsageError, "'0' is a BatchRenormalization, which", convert_sync_batch_normalization, more, comm)
    patched = links.BatchNormalization(3)
    patched.forward = lambda x: functions.tanh(links.BatchNormalization.forward(patched, x))
    refuses(UsageError, "the layer is a BatchNorm.*, which", convert_sync_batch_normalization, patched, comm)
    x = chainer.Variable(whole_batch(comm.rank, 4, (3, 2), "float32"))
    functions.sum(layer(x) ** 3).backward(enable_double_backprop=True)
    twice = functions.sum(x.grad_var**2).backward
    refuses(RuntimeError, "cannot twice-differentiate an old style Function", twice)


@all_raise(
    MismatchError, "'SyncBatchNormalization first forward'", "'SyncBatchNormalization listed/0 forward'"
)
def test_layers_in_different_order_are_reported(comm: Communicator) -> None:
    group = comm.split(0)  # this one will be broken
    model = convert_sync_batch_normalization(_Nested(), group)
    (model.first if comm.rank == 0 else model.listed[0])(np.ones((2, 2), np.float32))


class _Nested(chainer.Chain):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        shared = links.BatchNormalization(2)
        several = (links.Linear(2, 2), links.Linear(2, 2), shared, functions.relu, shared, links.Linear(2, 2))
        with self.init_scope():
            self.first = links.BatchNormalization(2)
            self.last = self.first
            self.several = chainer.Sequential(*several)
            self.listed = chainer.ChainList(links.BatchNormalization(2), links.Linear(2, 2))

    def forward(self, x: Any) -> Any:
        return self.last(self.listed[0](self.several(self.first(x))))


def test_conversion(comm: Communicator, tmp_path: Path) -> None:
    model = _Nested()
    parameters = [(name, id(parameter)) for name, parameter in model.namedparams()]
    assert convert_sync_batch_normalization(model, comm) is model
    assert [(name, id(parameter)) for name, parameter in model.namedparams()] == parameters
    kinds = [type(link) for link in model.links()]
    assert kinds.count(SyncBatchNormalization) == 5
    assert model.several[2] is model.several[4]
    assert model.first is model.last
    batch = whole_batch(comm.rank, 3 + comm.rank, (2,), "float32")
    model(batch)
    assert same_everywhere(comm, model.several[2].avg_mean.tobytes())
    copied = copy.deepcopy(model)
    before = model.first.avg_mean.copy()
    copied(batch)
    np.testing.assert_array_equal(model.first.avg_mean, before)
    assert not np.array_equal(copied.first.avg_mean, before)
    assert copied.first.gamma is not model.first.gamma
    path = f"{tmp_path}/{comm.rank}.npz"
    chainer.serializers.save_npz(path, model)
    plain = _Nested()
    chainer.serializers.load_npz(path, plain)
    np.testing.assert_array_equal(plain.first.avg_mean, before)
    single = convert_sync_batch_normalization(links.BatchNormalization(2), comm)
    assert isinstance(single, SyncBatchNormalization)
    assert convert_sync_batch_normalization(single, comm) is single
