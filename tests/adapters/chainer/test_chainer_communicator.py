"""ChainerMN's communicator over the core: arrays, models, and Python objects, also by `mpi_comm`."""

from __future__ import annotations

import copy
import logging
import pickle
import types
from typing import Any
from unittest import mock

import numpy as np
import pytest

import multiring.chainer  # isort: skip  # before chainermn, which it makes importable

import chainermn

from multiring import Communicator
from multiring.errors import AbortedError, MismatchError, UsageError
from tests.adapters.chainer.support import bits_of, gradients_of, make_model, make_optimizer, squares
from tests.on_ranks import all_raise, on_ranks, refuses

UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)
SHAPES: list[tuple[int, ...]] = [(), (1,), (0,), (2, 0, 3), (5,), (2, 3, 4)]


def value(rank: int, shape: tuple[int, ...], dtype: str) -> Any:
    count = int(np.prod(shape))
    return np.asarray(np.arange(count).reshape(shape) % 5 + rank, dtype)


def same(found: Any, wanted: Any) -> None:
    """Of one type, dtype and shape, and equal; of tuples likewise, where a list arrives as a tuple."""
    if isinstance(wanted, tuple | list):
        assert type(found) is tuple
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
        return
    assert type(found) is np.ndarray
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_array_equal(found, wanted)


@on_ranks(1, 3)
@pytest.mark.parametrize("dtype", ["bool", "float16"])
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
        every = tuple(value(r, shape, dtype) for r in everyone)
        same(mn.allgather(mine), every)
        gathered = mn.gather(mine, root)
        if mn.rank == root:
            same(gathered, every)
        else:
            assert gathered is None
        mixed = tuple(value(mn.rank + r, shape, dtype) for r in everyone)
        same(mn.alltoall(mixed), mixed)
        same(mn.scatter(every if mn.rank == root else None, root), mine)
    rows = np.arange(mn.size * 3).reshape(mn.size, 3).astype(dtype)
    same(mn.scatter(rows if mn.rank == 0 else "ignored"), rows[mn.rank])


@on_ranks(3)
def test_shapes_may_differ(comm: Communicator) -> None:
    """What a rank passes need not have the shape of what others pass, and need not be contiguous."""
    mn = multiring.chainer.create_communicator(comm)

    def shaped(source: int, target: int) -> Any:
        return np.full((source, target + 1), 10.0 * source + target, np.float32).T

    everyone = range(mn.size)
    mine = [shaped(mn.rank, target) for target in everyone]
    same(mn.alltoall(mine), [shaped(source, mn.rank) for source in everyone])
    same(mn.allgather(mine[2]), [shaped(source, 2) for source in everyone])
    same(mn.scatter(mine if mn.rank == 1 else None, root=1), shaped(1, mn.rank))


def test_messages(comm: Communicator) -> None:
    mn = multiring.chainer.create_communicator(comm)
    peer = 1 - mn.rank

    def of(rank: int) -> list[tuple[int, Any]]:
        """Tags and arrays."""
        mixed = tuple(value(rank, shape, "float32") for shape in SHAPES)
        large = (np.arange(1 << 18, dtype=np.float64), np.ones((0, 2)), np.array(rank + 0.5))
        return [(3, mixed), (1, value(rank, (2, 3), "float16")), (0, large), (0, ()), (0, [np.ones(2)])]

    def send() -> None:
        for tag, data in of(mn.rank):
            mn.send(data, peer, tag)
            if tag == 1:
                mn.send_obj({"from": mn.rank}, peer)
        mn.send_obj([mn.rank], peer, tag=7)

    def receive() -> None:
        first, second, *others = of(peer)
        assert mn.recv_obj(peer, tag=7) == [peer]
        for tag, wanted in (second, first):
            same(mn.recv(peer, tag), wanted)
        assert mn.recv_obj(peer) == {"from": peer}
        for tag, wanted in others:
            same(mn.recv(peer, tag), wanted)

    for step in (send, receive) if mn.rank == 0 else (receive, send):
        step()
    # One small message leaves at once, so all may send first; also to oneself.
    mn.send((np.ones(2), np.ones(3)), peer, 3)
    assert len(mn.recv(peer, 3)) == 2
    sent = np.zeros(3)
    mn.send(sent, mn.rank, 5)
    sent[:] = 1
    same(mn.recv(mn.rank, 5), np.zeros(3))
    refuses(UsageError, "nothing with tag 5 was sent from this rank to itself", mn.recv, mn.rank, 5)
    mn.send_obj("word", mn.rank)
    refuses(UsageError, "was sent by send_obj; receive it with recv_obj", mn.recv, mn.rank, 0)
    assert mn.recv_obj(mn.rank) == "word"
    refuses(UsageError, "no receiving from any rank", mn.recv_obj, -2)


def test_refused(comm: Communicator) -> None:
    make = multiring.chainer.create_communicator
    mn = make(comm)
    pair = (np.zeros(2), np.zeros(2))
    for call in (mn.allreduce, mn.allgather, mn.gather, mn.bcast):
        refuses(TypeError, "tuple data", call, pair)
        refuses(TypeError, "does not support dtype complex64", call, np.zeros(2, np.complex64))
        refuses(TypeError, "takes an array", call, "text")
    single = np.zeros(2, "float32" if mn.rank else "float64")
    refuses(TypeError, "arrays have to be of one dtype, not float32 and float64", mn.allgather, single)
    refuses(TypeError, "takes an array", mn.send, 3, 0, 0)
    refuses(TypeError, "one dtype", mn.send, (np.zeros(1), np.zeros(1, np.float32)), 0, 0)
    refuses(ValueError, "same as communicator size", mn.alltoall, (np.zeros(2),) * (mn.size + 1))
    # The root alone sees what is wrong, and all are told.
    refuses(ValueError, "scatter received 1 arrays", mn.scatter, pair[:1] if mn.rank == 1 else None, 1)
    refuses(ValueError, "Unknown config: nothing", mn.set_config, "nothing", 1)
    double = "allreduce_grad_dtype", np.float64
    refuses(UsageError, "allreduce_grad_dtype=float64: .*leave it out", mn.set_config, *double)
    for arguments, options, text in (
        (["fast"], {}, "'fast'.*no such communicator; leave the name out.*pure_nccl"),
        ([], {"communicator_name": "dummy"}, "no communicator here that sends nothing"),
        (["naive"], {"communicator_name": "flat"}, "two names, 'naive' and 'flat'"),
        ([object()], {}, r"is no communicator of multiring.*create_communicator\(\)"),
        ([comm], {"allreduce_grad_dtype": np.int8}, "=int8.*leave it out"),
        ([comm, types.SimpleNamespace(rank=0, size=3)], {}, "pass one with the same ranks"),
    ):
        refuses(UsageError, text, make, *arguments, **options)
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
    refuses(KeyError, "nothing", other.get_config, "nothing")
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
    duplicate = half.mpi_comm.Dup()
    assert duplicate.allgather(mn.rank) == members
    duplicate.Free()
    refuses(AbortedError, "is closed", duplicate.barrier)
    half.finalize()
    undefined = mn.split(-32766 if mn.rank else 0, 0)  # MPI.UNDEFINED
    assert (undefined is None) == (mn.rank > 0)
    assert (mn.split(0 if mn.rank == 1 else None, 0) is None) == (mn.rank != 1)
    assert mn.mpi_comm.Split(-1) is None
    assert copy.deepcopy([mn.mpi_comm])[0] is mn.mpi_comm
    refuses(UsageError, "cannot be pickled", pickle.dumps, mn.mpi_comm)
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


@on_ranks(1, 2)
def test_gradients_that_are_cast(comm: Communicator) -> None:
    """To float16 and back: with one rank there is nothing to cast for."""
    mn = multiring.chainer.create_communicator(comm, allreduce_grad_dtype="float16")
    model = make_model()
    for dtype in (np.float16, None):
        mn.set_config("allreduce_grad_dtype", dtype)
        model.cleargrads()
        squares(model, mn.rank).backward()
        arrays = {path: p.grad for path, p in model.namedparams() if p.grad is not None}
        wanted = {
            path: comm.allreduce(array.astype(dtype if mn.size > 1 else None), "average").astype(array.dtype)
            for path, array in sorted(arrays.items())
        }
        mn.multi_node_mean_grad(model)
        for path, p in model.namedparams():
            if path in arrays:
                assert p.grad is arrays[path]
                np.testing.assert_array_equal(p.grad, wanted[path])


@on_ranks(1)
@pytest.mark.parametrize("options", [{"op": "sum", "prescale": 2.0}, {"double_buffering": True}])
def test_one_rank_casts_nothing(comm: Communicator, options: dict[str, Any]) -> None:
    mn = multiring.chainer.create_communicator(comm, allreduce_grad_dtype="float16")
    model = make_model()
    optimizer = make_optimizer(mn, model, **options)
    for _ in range(2):
        for parameter in model.params():
            if parameter.is_initialized:
                parameter.grad = np.full(parameter.shape, 1e5, parameter.dtype)  # infinite in float16
        optimizer.update()
    assert all(np.isfinite(parameter.array).all() for parameter in model.params())


@all_raise(MismatchError, r"'first/W' float16 \(8, 6\)")
def test_dtypes_of_gradients_that_differ_are_refused(comm: Communicator) -> None:
    mn = multiring.chainer.create_communicator(comm, allreduce_grad_dtype="float16" if comm.rank else None)
    make_optimizer(mn, make_model())


@all_raise(MismatchError, r"'first/W' float64 \(8, 6\)")
def test_different_models_are_refused(comm: Communicator) -> None:
    mn = multiring.chainer.create_communicator(comm)
    model = make_model(inputs=None if comm.rank else 6)
    model.cleargrads()
    mn.multi_node_mean_grad(model)


def test_names_of_chainermn_are_accepted(comm: Communicator) -> None:
    names = ("pure_nccl", "hierarchical", "two_dimensional", "single_node", "non_cuda_aware", "naive", "flat")
    with mock.patch.object(logging.getLogger("multiring"), "warning") as warning:
        for name in names[:-1]:
            assert multiring.chainer.create_communicator(name).size == comm.size
        named = multiring.chainer.create_communicator(communicator_name=names[-1], batched_copy=False)
    assert named.allreduce(x=np.ones(1)) == comm.size
    lines = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    for name, line in zip(names if comm.rank == 0 else (), lines, strict=True):
        assert f"({name!r}): multiring has one kind of communicator, which is used: 2 ranks on " in line


def test_bool_and_masked_arrays(comm: Communicator) -> None:
    """Bool has no sum, and a mask would get lost: the root's error reaches all ranks."""
    mn = multiring.chainer.create_communicator(comm)
    masked: Any = np.ma.MaskedArray(np.ones(3), mask=[False, True, False])
    with pytest.raises(UsageError, match="bool has no sum"):
        mn.allreduce(np.ones(3, bool))
    for call in (mn.allreduce, mn.bcast, mn.allgather):
        with pytest.raises(UsageError, match="is masked"):
            call(masked)
    assert not comm.is_broken
