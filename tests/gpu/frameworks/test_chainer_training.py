"""Chainer's models on a device: gradients, state from a root, training that is what the host's is."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.gpu.chainer_on_device import (
    LIBRARIES,
    assert_placed,
    communicator,
    loss_of,
    model_on_device,
    on_stream,
    placed,
)

# isort: split
import chainer
import chainermn
from chainer import links
from chainer.backends import cuda

import multiring.chainer
from multiring import Communicator
from multiring.chainer.gradient_slots import GradientSlots
from multiring.chainer.parameters import named_parameters
from multiring.gradients.options import ReducerOptions
from tests.adapters.chainer.support import make_model, make_optimizer
from tests.gpu.devices import library
from tests.on_ranks import on_ranks, same_everywhere

# What computes on a device rounds otherwise than NumPy; the stand-in has NumPy compute.
RTOL = {"cupy": 1e-9, "fake": 0.0}


def _differentiate(model: Any, rank: int, **options: Any) -> None:
    model.cleargrads()
    loss_of(model, rank, **options).backward()


def _averages(comm: Communicator, model: Any, cast: Any = None, **options: Any) -> dict[str, Any]:
    """The average gradients of the ranks, on the host, and of the core's sums of what they compute here."""
    _differentiate(model, comm.rank, **options)
    found = {}
    for path, parameter in sorted(model.namedparams()):
        gradient = parameter.grad
        gradient = np.zeros_like(cuda.to_cpu(parameter.array)) if gradient is None else cuda.to_cpu(gradient)
        sent = gradient if cast is None else gradient.astype(cast)
        found[path] = comm.allreduce(sent, "average").astype(gradient.dtype)
    return found


def _assert_gradients(model: Any, wanted: dict[str, Any]) -> None:
    for path, parameter in model.namedparams():
        assert_placed(parameter.grad, wanted[path])


@on_ranks(1, 2, 3)
@LIBRARIES
@pytest.mark.parametrize("dtype", [None, "float16"])
def test_mean_of_gradients(comm: Communicator, name: str, dtype: str | None) -> None:
    """In the arrays that the program has; the bits of an allreduce, of what was cast if asked for."""
    mn = communicator(comm, allreduce_grad_dtype=dtype)
    model = model_on_device()
    cast = None if comm.size == 1 else dtype
    wanted = _averages(comm, model_on_device(), cast, spare=True)
    for _ in range(3):  # the order of the buckets changes after the first
        _differentiate(model, comm.rank, spare=True)
        before = {path: parameter.grad for path, parameter in model.namedparams()}
        mn.multi_node_mean_grad(model)
        _assert_gradients(model, wanted)
        assert all(parameter.grad is before[path] for path, parameter in model.namedparams())
        assert before["/first/W"].dtype == np.float64
    mn.finalize()


@on_ranks(2)
@LIBRARIES
def test_gradients_of_some_ranks(comm: Communicator, name: str) -> None:
    """A rank that has none takes part with zeros, and gets the average on its device."""
    mn = communicator(comm)
    model = model_on_device()
    wanted = _averages(comm, model_on_device(), spare=comm.rank == 1)
    _differentiate(model, comm.rank, spare=comm.rank == 1)
    assert (model.spare.W.grad is None) == (comm.rank == 0)
    mn.multi_node_mean_grad(model)
    _assert_gradients(model, wanted)
    _differentiate(model, comm.rank)
    mn.allreduce_grad(model, zero_fill=False)
    assert model.spare.W.grad is None
    mn.multi_node_mean_grad(model, zero_fill=True)
    assert_placed(model.spare.W.grad, np.zeros((3, 8)))


@on_ranks(2)
@LIBRARIES
def test_gradients_in_odd_places(comm: Communicator, name: str) -> None:
    """One array for two parameters, views of one array, and elements that do not lie in C order."""
    mn = communicator(comm)
    model = model_on_device()
    _differentiate(model, comm.rank)
    shared = placed(np.full((8, 8), comm.rank + 1.0))
    whole = placed(np.full((20,), comm.rank + 2.0))
    model.middle.W.grad, model.first.W.grad = shared, shared[:, :6]
    model.first.b.grad, model.middle.b.grad = whole[:8], whole[8:16]
    model.last.W.grad = placed(np.full((8, 3), comm.rank + 5.0)).T
    kept = model.last.W.grad
    mn.multi_node_mean_grad(model)
    assert_placed(model.middle.W.grad, np.full((8, 8), 1.5))
    assert_placed(model.first.W.grad, np.full((8, 6), 1.5))
    assert_placed(whole[:16], np.full(16, 2.5))
    assert_placed(kept, np.full((3, 8), 5.5))
    assert model.last.W.grad is kept


@on_ranks(2)
@LIBRARIES
@pytest.mark.parametrize("options", [{}, {"overlap": False}], ids=["overlap", "after"])
def test_gradients_that_come_late(comm: Communicator, name: str, options: dict[str, Any]) -> None:
    model = model_on_device()
    optimizer = make_optimizer(comm, model, **options)
    wanted = _averages(comm, model_on_device())

    def differentiate() -> None:
        for parameter in model.params():
            parameter.array += 0.0  # after the stream's work, as all that the pass computes
        model.cleargrads()
        optimizer.backward(loss_of(model, comm.rank))

    for _ in range(3):
        on_stream(name, differentiate)
        for path, parameter in model.namedparams():
            if "spare" not in path:
                assert_placed(parameter.grad, wanted[path], RTOL[name])
    optimizer.close()


@on_ranks(2)
@pytest.mark.parametrize("name", ["cupy"])  # copies of the stand-in for CuPy wait for their stream
def test_gradients_of_several_streams(comm: Communicator, name: str) -> None:
    """Each is copied by the stream that is the current one then, whichever is when its bucket leaves."""
    on = library(name)
    parameters = named_parameters(model_on_device())
    slots = GradientSlots(parameters, comm, ReducerOptions())
    gradients = [cuda.cupy.zeros_like(parameter.array) for parameter in slots.parameters]
    last, *others = range(len(gradients))
    for indexes in (others, [last]):
        with on.stream():
            if indexes == others:
                on.busy()
            for index in indexes:
                gradients[index] += comm.rank + 1
                slots.arrived(index, gradients[index])
    with on.stream():
        slots.reduce()
        for parameter in slots.parameters:
            assert_placed(parameter.grad, np.full(parameter.shape, 1.5, parameter.dtype))
    slots.close()


def _train(comm: Communicator, model: Any, actual: Any, **options: Any) -> Any:
    optimizer = make_optimizer(comm, model, actual, **options)
    for _ in range(5):
        optimizer.update(loss_of, model, comm.rank)
    optimizer.check_state()
    optimizer.close()
    return optimizer


@on_ranks(2)
@LIBRARIES
@pytest.mark.parametrize(
    "options",
    [{}, {"overlap": False}, {"double_buffering": True}, {"zero_fill": False}, {"op": "sum"}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [None, "float16"])
def test_training_is_that_of_the_host(
    comm: Communicator, name: str, options: dict[str, Any], dtype: str | None
) -> None:
    mn = communicator(comm, allreduce_grad_dtype=dtype)
    model, host = model_on_device(comm.rank), make_model(comm.rank)  # both take over those of rank 0
    _train(mn, model, chainer.optimizers.MomentumSGD(0.05), **options)
    _train(mn, host, chainer.optimizers.MomentumSGD(0.05), **options)
    rtol = RTOL[name] if dtype is None else 10 * RTOL[name] ** 0.5
    for (path, one), (_, two) in zip(model.namedparams(), host.namedparams(), strict=True):
        assert_placed(one.array, two.array, rtol)
        assert same_everywhere(comm, one.array.get().tobytes()), path


@on_ranks(2)
def test_nothing_is_copied_to_the_host_fake(comm: Communicator) -> None:
    """Neither gradients nor what collectives are given: the core copies them, in pinned memory."""
    mn = communicator(comm)
    model = model_on_device()
    _differentiate(model, comm.rank)
    mn.multi_node_mean_grad(model)  # compares what ranks have
    x = placed(np.ones((3, 4)))
    with mock.patch.object(cuda.ndarray, "get", side_effect=AssertionError("copied to the host")):
        mn.multi_node_mean_grad(model)
        mn.bcast_data(model)
        mn.allreduce(x)
        mn.bcast(x)
        mn.allgather(x)
        mn.gather(x)
        mn._multi_node_mean(None, x)
        mn.alltoall((x, x))
        mn.send(x, 1) if mn.rank == 0 else mn.recv(0)
        chainermn.functions.allgather(mn, chainer.Variable(x))
        multiring.chainer.broadcast_parameters(model, 1, comm)


@on_ranks(2)
@LIBRARIES
def test_state_of_a_root(comm: Communicator, name: str) -> None:
    """Parameters, persistent arrays of sizes at which others would not lie aligned, and optimizers' state."""
    mn = communicator(comm)
    model = model_on_device(comm.rank)
    reference = make_model(0)
    model.add_persistent("odd", placed(np.full(3, comm.rank + 1, np.int8)))
    model.add_persistent("half", placed(np.full((2, 2), comm.rank + 2, np.float16)))
    model.add_persistent("even", placed(np.full(5, comm.rank + 3.0)))
    mn.bcast_data(model)
    for (_, one), (_, two) in zip(model.namedparams(), reference.namedparams(), strict=True):
        assert_placed(one.array, two.array)
    assert_placed(model.odd, np.full(3, comm.rank + 1, np.int8))
    multiring.chainer.broadcast_parameters(model, 1, comm)
    assert_placed(model.odd, np.full(3, 2, np.int8))
    assert_placed(model.half, np.full((2, 2), 3, np.float16))
    assert_placed(model.even, np.full(5, 4.0))
    optimizer = chainer.optimizers.MomentumSGD().setup(model)
    for parameter in model.params():
        parameter.update_rule._init_states(parameter)
        parameter.update_rule.state["v"] += comm.rank + 1
    if comm.rank == 0:
        model.first.W.update_rule._state = None
    multiring.chainer.broadcast_optimizer_state(optimizer, 1, comm)
    for parameter in model.params():
        assert_placed(parameter.update_rule.state["v"], np.full(parameter.shape, 2.0))


@on_ranks(2)
@LIBRARIES
@pytest.mark.parametrize("mode", ["broadcast", "average"])
def test_persistent_arrays(comm: Communicator, name: str, mode: Any) -> None:
    model = model_on_device()
    model.add_persistent("odd", placed(np.full(3, comm.rank + 1, np.int8)))
    model.add_persistent("mean", placed(np.full((2, 3), comm.rank + 1, np.float32)))
    model.add_persistent("here", np.full(2, comm.rank + 1.0))  # on the host
    optimizer = make_optimizer(comm, model, buffers=mode)
    model.odd += comm.rank
    model.mean += comm.rank
    model.here += comm.rank
    optimizer.update(loss_of, model, comm.rank)
    offset = 0 if mode == "broadcast" else 0.5
    assert_placed(model.odd, np.full(3, 1, np.int8))
    assert_placed(model.mean, np.full((2, 3), 1 + offset, np.float32))
    assert isinstance(model.here, np.ndarray)
    np.testing.assert_array_equal(model.here, np.full(2, 1 + offset))
    optimizer.close()


def _normalised(comm: Communicator, model: Any, x: Any, place: Any) -> tuple[Any, ...]:
    model.cleargrads()
    x = chainer.Variable(place(x))
    y = model(x)
    chainer.functions.sum(y * place(np.arange(12.0, dtype=np.float32).reshape(4, 3) + comm.rank)).backward()
    return y.array, x.grad, model.gamma.grad, model.beta.grad, model.avg_mean, model.avg_var


@on_ranks(2)
@LIBRARIES
@pytest.mark.parametrize("kind", ["ChainerMN's", "synchronised"])
def test_batch_normalisation(comm: Communicator, name: str, kind: str) -> None:
    mn = communicator(comm)
    x = np.random.default_rng(comm.rank).standard_normal((4, 3)).astype(np.float32)

    def make() -> Any:
        if kind == "synchronised":
            return multiring.chainer.SyncBatchNormalization(3, comm=mn)
        return chainermn.links.MultiNodeBatchNormalization(3, mn, communication_backend="mpi")

    model, host = make(), make()
    model.to_gpu()
    found = _normalised(comm, model, x, placed)
    for one, two in zip(found, _normalised(comm, host, x, np.asarray), strict=True):
        np.testing.assert_allclose(one.get(), two, rtol=1e-4, atol=1e-5)
    assert all(isinstance(one, cuda.ndarray) for one in found)


@on_ranks(2)
@LIBRARIES
def test_running_statistics_are_averaged(comm: Communicator, name: str) -> None:
    mn = communicator(comm)
    model = links.BatchNormalization(3)
    model.avg_mean[...] = comm.rank
    model.to_gpu()
    chainermn.extensions.AllreducePersistent(model, mn)()
    assert_placed(model.avg_mean, np.full(3, 0.5, np.float32))
