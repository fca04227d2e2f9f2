"""ChainerMN's communicator contract over the core."""

from __future__ import annotations

import copy
import logging
import pickle
import types
from typing import Any

import numpy as np
import pytest

import multiring.chainer  # isort: skip  # before chainermn, which it makes importable

import chainer
import chainermn

from multiring import Communicator
from multiring.errors import MismatchError, UsageError
from tests.adapters.chainer.support import bits_of, gradients_of, make_model, squares
from tests.on_ranks import Pool, all_raise, on_ranks

DTYPES = ["bool", "float16"]


SHAPES: list[tuple[int, ...]] = [(), (1,), (0,), (2, 0, 3), (5,), (2, 3, 4)]


def value(rank: int, shape: tuple[int, ...], dtype: str) -> Any:
    count = int(np.prod(shape))
    return np.asarray(np.arange(count).reshape(shape) % 5 + rank, dtype)


def same(found: Any, wanted: Any) -> None:
    assert type(found) is np.ndarray
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    np.testing.assert_array_equal(found, wanted)


@on_ranks(1, 3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_collectives(comm: Communicator, dtype: str) -> None:
    mn = multiring.chainer.create_communicator(comm)
    assert isinstance(mn, chainermn.CommunicatorBase)
    everyone = range(mn.size)
    root = mn.size - 1
    for shape in SHAPES:
        mine = value(mn.rank, shape, dtype)
        if dtype != "bool":
            total = sum((value(r, shape, dtype) for r in everyone), np.zeros(shape, dtype))
            same(mn.allreduce(mine), np.asarray(total))
        same(mn.bcast(mine if mn.rank == root else None, root), value(root, shape, dtype))
        for found in (mn.allgather(mine), mn.gather(mine, root)):
            assert found is not None or mn.rank != root
            for rank in everyone if found is not None else ():
                same(found[rank], value(rank, shape, dtype))
        for rank, found in enumerate(mn.alltoall(tuple(value(mn.rank + r, shape, dtype) for r in everyone))):
            same(found, value(rank + mn.rank, shape, dtype))
        data = tuple(value(r, shape, dtype) for r in everyone) if mn.rank == root else None
        same(mn.scatter(data, root), mine)
    rows = np.arange(mn.size * 3).reshape(mn.size, 3).astype(dtype)
    same(mn.scatter(rows if mn.rank == 0 else "ignored"), rows[mn.rank])


@on_ranks(3)
def test_shapes_may_differ(comm: Communicator) -> None:
    """What a rank passes need not have the shape of what others pass, and need not be contiguous."""
    mn = multiring.chainer.create_communicator(comm)

    def shaped(source: int, target: int) -> Any:
        return np.full((source, target + 1), 10.0 * source + target, np.float32).T

    received = mn.alltoall([shaped(mn.rank, target) for target in range(mn.size)])
    for source, found in enumerate(received):
        same(found, shaped(source, mn.rank))
    for source, found in enumerate(mn.allgather(shaped(mn.rank, 2))):
        same(found, shaped(source, 2))
    same(
        mn.scatter([shaped(1, target) for target in range(mn.size)] if mn.rank == 1 else None, root=1),
        shaped(1, mn.rank),
    )


def test_messages(comm: Communicator) -> None:
    mn = multiring.chainer.create_communicator(comm)
    mixed = tuple(value(mn.rank, shape, "float32") for shape in SHAPES)
    peer = 1 - mn.rank
    large = (np.arange(1 << 18, dtype=np.float64), np.ones((0, 2)), np.array(mn.rank + 0.5))

    def send() -> None:
        mn.send(mixed, peer, 3)
        mn.send(value(mn.rank, (2, 3), "float16"), dest=peer, tag=1)
        mn.send_obj({"from": mn.rank}, peer)
        mn.send(large, peer, 0)
        mn.send((), peer, 0)
        mn.send([np.ones(2)], peer, 0)
        mn.send_obj([mn.rank], peer, tag=7)

    def receive() -> None:
        assert mn.recv_obj(peer, tag=7) == [peer]
        same(mn.recv(peer, 1), value(peer, (2, 3), "float16"))
        found = mn.recv(peer, 3)
        assert isinstance(found, tuple)
        for one, shape in zip(found, SHAPES, strict=True):
            same(one, value(peer, shape, "float32"))
        assert mn.recv_obj(peer) == {"from": peer}
        for one, other in zip(mn.recv(peer, 0), (*large[:2], np.array(peer + 0.5)), strict=True):
            same(one, other)
        assert mn.recv(peer, 0) == ()
        (only,) = mn.recv(peer, 0)
        same(only, np.ones(2))

    for step in (send, receive) if mn.rank == 0 else (receive, send):
        step()
    # One small message leaves at once, so all may send first; also to oneself.
    mn.send(mixed, peer, 3)
    assert len(mn.recv(peer, 3)) == len(mixed)
    sent = np.zeros(3)
    mn.send(sent, mn.rank, 5)
    sent[:] = 1
    same(mn.recv(mn.rank, 5), np.zeros(3))
    with pytest.raises(UsageError, match="nothing with tag 5 was sent from this rank to itself"):
        mn.recv(mn.rank, 5)
    mn.send_obj("word", mn.rank)
    with pytest.raises(UsageError, match="was sent by send_obj; receive it with recv_obj"):
        mn.recv(mn.rank, 0)
    assert mn.recv_obj(mn.rank) == "word"
    with pytest.raises(UsageError, match="no receiving from any rank"):
        mn.recv_obj(-2)


def test_refused(comm: Communicator) -> None:
    make = multiring.chainer.create_communicator
    mn = make(comm)
    pair = (np.zeros(2), np.zeros(2))
    for call in (mn.allreduce, mn.allgather, mn.gather, mn.bcast):
        with pytest.raises(TypeError, match="tuple data"):
            call(pair)
        with pytest.raises(TypeError, match="does not support dtype complex64"):
            call(np.zeros(2, np.complex64))
        with pytest.raises(TypeError, match="takes an array"):
            call("text")
    with pytest.raises(TypeError, match="all arrays have to be of one dtype, not float32 and float64"):
        mn.allgather(np.zeros(2, "float32" if mn.rank else "float64"))
    with pytest.raises(TypeError, match="takes an array"):
        mn.send(3, 0, 0)
    with pytest.raises(TypeError, match="one dtype"):
        mn.send((np.zeros(1), np.zeros(1, np.float32)), 0, 0)
    with pytest.raises(ValueError, match="same as communicator size"):
        mn.alltoall((np.zeros(2),) * (mn.size + 1))
    # The root alone sees what is wrong, and all are told.
    with pytest.raises(ValueError, match="scatter received 1 arrays"):
        mn.scatter((np.zeros(2),) if mn.rank == 1 else None, 1)
    with pytest.raises(ValueError, match="Unknown config: nothing"):
        mn.set_config("nothing", 1)
    with pytest.raises(UsageError, match="allreduce_grad_dtype=float64: .*leave it out"):
        mn.set_config("allreduce_grad_dtype", np.float64)
    for arguments, options, text in (
        (["fast"], {}, "'fast'.*no such communicator; leave the name out.*pure_nccl"),
        ([], {"communicator_name": "dummy"}, "no communicator here that sends nothing"),
        (["naive"], {"communicator_name": "flat"}, "two names, 'naive' and 'flat'"),
        ([object()], {}, r"is no communicator of multiring.*create_communicator\(\)"),
        ([comm], {"allreduce_grad_dtype": np.float16}, "=float16.*pass comm_dtype='float16'"),
        ([comm, types.SimpleNamespace(rank=0, size=3)], {}, "pass one with the same ranks"),
    ):
        with pytest.raises(UsageError, match=text):
            make(*arguments, **options)
    assert mn.allreduce(np.ones(1)) == mn.size


@all_raise(MismatchError, "chainer allreduce")
def test_a_mismatch_names_the_operation(comm: Communicator) -> None:
    multiring.chainer.create_communicator(comm).allreduce(np.zeros(2 + comm.rank))


@on_ranks(3)
def test_properties(comm: Communicator) -> None:
    mn = multiring.chainer.create_communicator(comm)
    assert (mn.rank, mn.size) == (comm.rank, comm.size)
    assert (mn.intra_rank, mn.intra_size) == (comm.local_rank, comm.local_size)
    assert (mn.inter_rank, mn.inter_size) == (comm.cross_rank, comm.cross_size)
    assert mn.get_config("batched_copy") is mn.batched_copy is True
    mn.set_config("batched_copy", False)
    assert mn.batched_copy is False
    assert mn.get_config() == {"batched_copy": False, "allreduce_grad_dtype": None}
    other = multiring.chainer.create_communicator(allreduce_grad_dtype=np.float32)
    assert (other.size, other.get_config("batched_copy")) == (comm.size, True)
    assert other.get_config("allreduce_grad_dtype") == other.allreduce_grad_dtype == np.float32
    with pytest.raises(KeyError, match="nothing"):
        other.get_config("nothing")
    mpi = types.SimpleNamespace(rank=comm.rank, size=comm.size)
    assert multiring.chainer.create_communicator(comm, mpi_comm=mpi).mpi_comm is mpi


@on_ranks(3)
def test_split(comm: Communicator) -> None:
    mn = multiring.chainer.create_communicator(comm, batched_copy=False)
    with mn.config_scope():
        mn.of_its_own = "setting"
    half = mn.split(mn.rank % 2, -mn.rank)
    assert half is not None
    members = [rank for rank in reversed(range(mn.size)) if rank % 2 == mn.rank % 2]
    assert members[half.rank] == mn.rank
    assert half.allreduce_obj([mn.rank]) == half.mpi_comm.allgather(mn.rank) == members
    assert (half.get_config(), half.of_its_own) == (mn.get_config(), "setting")
    assert (half.mpi_comm.rank, half.mpi_comm.size) == (half.rank, half.size)
    half.set_config("batched_copy")
    assert mn.get_config("batched_copy") is False
    assert half.mpi_comm.Split(key=-half.rank).allgather(mn.rank) == members[::-1]
    half.finalize()
    undefined = mn.split(-32766 if mn.rank else 0, 0)  # MPI.UNDEFINED
    assert (undefined is None) == (mn.rank > 0)
    assert (mn.split(0 if mn.rank == 1 else None, 0) is None) == (mn.rank != 1)
    assert mn.mpi_comm.Split(-1) is None
    assert copy.deepcopy([mn.mpi_comm])[0] is mn.mpi_comm
    with pytest.raises(UsageError, match="cannot be pickled"):
        pickle.dumps(mn.mpi_comm)
    mn.finalize()
    assert mn.allreduce_obj(1) == mn.size


def test_models_are_averaged(comm: Communicator) -> None:
    mn = multiring.chainer.create_communicator(comm)
    model = make_model(seed=mn.rank)
    mn.broadcast_data(model)
    assert bits_of(model) == bits_of(make_model(seed=0))
    for step in range(2):
        model.cleargrads()
        squares(model, mn.rank).backward()
        before = gradients_of(model)
        mn.multi_node_mean_grad(model, zero_fill=step == 1)
        for name, parameter in model.namedparams():
            if before[name] is None:
                assert parameter.grad is None if step == 0 else not parameter.grad.any()
            else:
                wanted = sum(mn.allgather(before[name])) / mn.size
                np.testing.assert_allclose(parameter.grad, wanted, rtol=1e-13)
    with pytest.warns(DeprecationWarning, match="allreduce_grad"):
        mn.allreduce_grad(model)


def test_halves_are_averaged_in_single_precision(comm: Communicator) -> None:
    """float16 is added up in float32: 2049 would not survive a sum in float16."""
    mn = multiring.chainer.create_communicator(comm)
    out = np.array([2049 if mn.rank == 0 else 1, 1], np.float16)
    mn._multi_node_mean(None, out)
    np.testing.assert_array_equal(out, np.array([(2048 + mn.size - 1) / mn.size, 1], np.float16))
    kept, result = np.arange(3.0), np.empty(3)
    mn._multi_node_mean(kept, result)
    np.testing.assert_array_equal(result, kept)


@all_raise(MismatchError, r"'first/W' float64 \(8, 6\)")
def test_different_models_are_refused(comm: Communicator) -> None:
    mn = multiring.chainer.create_communicator(comm)
    model = make_model(inputs=None if comm.rank else 6)
    model.cleargrads()
    mn.multi_node_mean_grad(model)


def make_by_name(comm: Communicator) -> list[str]:
    """What is logged about names that ChainerMN's programs pass."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("multiring").addHandler(handler)
    for name in ("pure_nccl", "hierarchical", "two_dimensional", "single_node", "non_cuda_aware", "naive"):
        assert multiring.chainer.create_communicator(name).size == comm.size
    named = multiring.chainer.create_communicator(communicator_name="flat", batched_copy=False)
    assert named.allreduce(x=np.ones(1)) == comm.size
    logging.getLogger("multiring").removeHandler(handler)
    return lines


def test_names_of_chainermn_are_accepted(ranks: Pool) -> None:
    lines, others = ranks(2).run(make_by_name)
    assert len(lines) == 7
    assert all("one kind of communicator, which is used: 2 ranks on " in line for line in lines)
    assert "'pure_nccl'" in lines[0]
    assert "'flat'" in lines[-1]
    assert others == []


@pytest.mark.skipif(not chainer.backends.cuda.available, reason="CuPy with a GPU is not available")
def test_gpu_arrays(comm: Communicator) -> None:
    from chainer.backends import cuda

    mn = multiring.chainer.create_communicator(comm)
    x = cuda.cupy.arange(6, dtype="float32") + mn.rank
    for found in (mn.allreduce(x), mn.bcast(x), *mn.allgather(x)):
        assert isinstance(found, cuda.ndarray)
    np.testing.assert_array_equal(cuda.to_cpu(mn.bcast(x)), np.arange(6))
    model = make_model().to_gpu()
    model.cleargrads()
    mn.multi_node_mean_grad(model, zero_fill=True)
    assert all(isinstance(parameter.grad, cuda.ndarray) for parameter in model.params())
