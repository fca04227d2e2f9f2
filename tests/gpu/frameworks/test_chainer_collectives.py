"""ChainerMN's communicator with arrays on a device: they come back on the device, and nothing reads them too
early."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.gpu.chainer_on_device import LIBRARIES, assert_placed, communicator, on_stream, placed

# isort: split
import chainer
import chainermn
from chainer.backends import cuda

import multiring.chainer
from multiring import Communicator, UsageError
from tests.on_ranks import on_ranks

DTYPES = ("bool", "int8", "uint16", "int32", "int64", "float16", "float32", "float64")
NAMES = ("pure_nccl", "hierarchical", "two_dimensional", "single_node", "non_cuda_aware", "naive", "flat")


def _values(rank: int, shape: tuple[int, ...] = (3, 4), dtype: str = "float32") -> Any:
    return (np.arange(np.prod(shape)).reshape(shape) % 5 + rank).astype(dtype)


@on_ranks(1, 2, 3)
@LIBRARIES
def test_arrays_of_every_dtype(comm: Communicator, name: str) -> None:
    mn = communicator(comm)
    size, rank = mn.size, mn.rank
    for dtype in DTYPES:
        x = placed(_values(rank, dtype=dtype))
        every = [_values(r, dtype=dtype) for r in range(size)]
        if dtype != "bool":
            assert_placed(mn.allreduce(x), sum(every[1:], every[0]))
        assert_placed(mn.bcast(x, root=size - 1), every[-1])
        for found in (mn.allgather(x), mn.gather(x, root=0)):
            for one, wanted in zip(found or (), every, strict=bool(found)):
                assert_placed(one, wanted)
        for r, one in enumerate(
            mn.alltoall(tuple(placed(_values(10 * rank + k, dtype=dtype)) for k in range(size)))
        ):
            assert_placed(one, _values(10 * r + rank, dtype=dtype))
        rows = placed(_values(0, (size, 2), dtype)) if rank == 0 else None
        assert_placed(mn.scatter(rows, root=0), _values(0, (size, 2), dtype)[rank])
        assert_placed(x, every[rank])


@on_ranks(2, 3)
@LIBRARIES
def test_shapes_that_differ(comm: Communicator, name: str) -> None:
    """Also none at all, no elements, and elements that do not lie in C order."""
    mn = communicator(comm)
    shapes = [(2, 3), (), (0, 4)][: mn.size]
    x = placed(_values(mn.rank, shapes[mn.rank]))
    for found in (mn.allgather(x), mn.gather(x, root=1)):
        for r, one in enumerate(found or ()):
            assert_placed(one, _values(r, shapes[r]))
    sent = tuple(placed(_values(10 * mn.rank + r, shape)) for r, shape in enumerate(shapes))
    for r, one in enumerate(mn.alltoall(sent)):
        assert_placed(one, _values(10 * r + mn.rank, shapes[mn.rank]))
    assert_placed(mn.scatter(sent if mn.rank == 0 else None, root=0), _values(mn.rank, shapes[mn.rank]))
    turned = placed(_values(mn.rank)).T
    assert_placed(mn.allreduce(turned), sum(_values(r).T for r in range(mn.size)))
    assert_placed(mn.bcast(turned, root=1), _values(1).T)


@on_ranks(2)
@LIBRARIES
def test_messages(comm: Communicator, name: str) -> None:
    mn = communicator(comm)
    sent = (_values(5), _values(6, ()), _values(7, (200, 300)), _values(8, (0, 2)))
    for tag, data in enumerate((sent[0], sent[2], sent)):
        if mn.rank == 0:
            one = tuple(map(placed, data)) if isinstance(data, tuple) else placed(data)
            mn.send(one, 1, tag)
        else:
            found = mn.recv(0, tag)
            assert isinstance(found, tuple) == isinstance(data, tuple)
            for x, wanted in zip(
                found if isinstance(found, tuple) else (found,),
                sent if isinstance(data, tuple) else (data,),
                strict=True,
            ):
                assert_placed(x, wanted)
    mn.send(placed(_values(1)), mn.rank, 9)
    assert_placed(mn.recv(mn.rank, 9), _values(1))
    objects = mn.allgather_obj if hasattr(mn, "allgather_obj") else mn.mpi_comm.allgather
    for r, found in enumerate(objects({"loss": placed(_values(mn.rank, ()))})):
        assert_placed(found["loss"], _values(r, ()))
    assert_placed(mn.bcast_obj([placed(_values(mn.rank))])[0], _values(0))
    assert_placed(mn.allreduce_obj(placed(_values(mn.rank))), _values(0) + _values(1))


@on_ranks(2)
@LIBRARIES
def test_a_stream_that_still_works(comm: Communicator, name: str) -> None:
    """What a collective sends is what the current stream makes, however late; what it gives is complete."""
    mn = communicator(comm)

    def late() -> Any:
        x = placed(np.zeros((100, 7), np.float32))
        x += mn.rank + 1
        return x

    for call in (mn.allreduce, lambda x: mn.allgather(x)[1], lambda x: mn.alltoall((x, x))[1]):
        wanted = 3 if call == mn.allreduce else 2
        assert (on_stream(name, lambda call=call: call(late()) * 2).get() == 2 * wanted).all()
    assert (on_stream(name, lambda: mn.bcast(late(), root=1)).get() == 2).all()

    def average() -> Any:
        out = placed(np.zeros((100, 7), np.float32))
        mn._multi_node_mean(late(), out)
        return out

    assert (on_stream(name, average).get() == 1.5).all()
    if mn.rank == 0:
        on_stream(name, lambda: mn.send(late(), 1))
    else:
        assert (on_stream(name, lambda: mn.recv(0) + 1).get() == 2).all()


@on_ranks(2)
@LIBRARIES
def test_host_on_one_rank(comm: Communicator, name: str) -> None:
    """Each rank gets what it has given; from a root, what the root has given."""
    mn = communicator(comm)
    x = _values(mn.rank) if mn.rank == 0 else placed(_values(mn.rank))
    for found in (mn.allreduce(x), mn.allgather(x)[0], mn.alltoall((x, x))[0]):
        assert isinstance(found, np.ndarray) == (mn.rank == 0)
    assert isinstance(mn.bcast(x, root=0), np.ndarray)
    assert_placed(mn.bcast(x, root=1), _values(1))
    for call in (mn.alltoall, lambda xs: mn.scatter(xs, root=0)):
        with pytest.raises(TypeError, match="all of CuPy or all of NumPy"):
            call((_values(0), placed(_values(0))))
    assert not comm.is_broken


@on_ranks(2)
@LIBRARIES
def test_a_rank_that_sees_no_device(comm: Communicator, name: str) -> None:
    """It is told so by what it receives first, and goes on with the next message."""
    mn = communicator(comm)
    if mn.rank == 0:
        mn.send((placed(_values(0)), placed(_values(1))), 1)
        mn.send(_values(2), 1)
        return
    with mock.patch.object(cuda, "available", False), pytest.raises(UsageError, match="there is no CuPy"):
        mn.recv(0)
    np.testing.assert_array_equal(mn.recv(0), _values(2))


@on_ranks(2)
@LIBRARIES
def test_names_of_chainermn(comm: Communicator, name: str) -> None:
    for kind in NAMES:
        mn = multiring.chainer.create_communicator(kind)
        assert_placed(mn.allreduce(placed(_values(mn.rank))), _values(0) + _values(1))


@on_ranks(2)
@LIBRARIES
def test_functions_of_chainermn(comm: Communicator, name: str) -> None:
    """They are differentiated on the device."""
    mn = communicator(comm)
    x = chainer.Variable(placed(_values(mn.rank)))
    every = chainermn.functions.allgather(mn, x)
    loss = chainer.functions.sum(every[0] * 2 + every[1])
    loss.backward()
    assert_placed(x.grad, np.full((3, 4), 4 if mn.rank == 0 else 2, np.float32))
    x = chainer.Variable(placed(_values(mn.rank)))
    y = chainermn.functions.bcast(mn, x, root=0)
    assert_placed(y.array, _values(0))
    chainer.functions.sum(y).backward()
    if mn.rank == 0:
        assert_placed(x.grad, np.full((3, 4), 2, np.float32))
    x = chainer.Variable(placed(_values(mn.rank)))
    other = 1 - mn.rank
    if mn.rank == 0:
        sent = chainermn.functions.send(x, mn, rank=other)
        sent.backward()
        assert_placed(x.grad, np.full((3, 4), 3, np.float32))
    else:
        received = chainermn.functions.recv(mn, rank=other)
        assert_placed(received.array, _values(0))
        chainer.functions.sum(received * 3).backward()


@on_ranks(2)
@LIBRARIES
def test_what_evaluates_and_iterates(comm: Communicator, name: str) -> None:
    mn = communicator(comm)

    class Evaluator(chainer.training.extensions.Evaluator):  # type: ignore[misc]
        def evaluate(self) -> Any:
            return {"loss": cuda.cupy.asarray(np.float32(mn.rank))}

    model = chainer.links.Linear(4, 3)
    evaluator = Evaluator({"main": None}, model)
    found = chainermn.create_multi_node_evaluator(evaluator, mn).evaluate()
    assert float(found["loss"]) == 0.5
    dataset = [_values(i, (2,)) for i in range(4)] if mn.rank == 0 else [0] * 4  # ChainerMN's are on the host
    iterator = chainermn.iterators.create_multi_node_iterator(
        chainer.iterators.SerialIterator(dataset, 2, shuffle=False), mn
    )
    batch = chainer.dataset.concat_examples(next(iterator), device=0)
    assert_placed(batch, np.stack([_values(0, (2,)), _values(1, (2,))]).astype(batch.dtype))
