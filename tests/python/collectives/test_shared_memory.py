"""Who owns memory: arrays without any, operations in flight that share it, arrays with gaps."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from multiring import Communicator, UsageError
from tests.on_ranks import on_ranks
from tests.python.collectives.registry import COLLECTIVES


def _given_back(elements: int, left: int) -> Any:
    """Return a tensor of whose storage so many elements are left."""
    import torch

    tensor = torch.ones(elements)
    tensor.untyped_storage().resize_(left * 4)
    return tensor


@pytest.mark.parametrize(("elements", "left"), [(8, 0), (100_000, 0), (100_000, 100)])
def test_a_tensor_whose_storage_was_given_back(comm: Communicator, elements: int, left: int) -> None:
    import torch

    without = _given_back(elements, left)
    text = rf"has elements in {4 * elements} bytes, of which its storage of {4 * left} bytes"
    for collective, asynchronous in itertools.product(COLLECTIVES.values(), (False, True)):
        if not collective.only_root or comm.rank == comm.size - 1:
            with pytest.raises(UsageError, match=text):
                collective.call(comm, without, asynchronous=asynchronous)
        if collective.takes_out:
            with pytest.raises(UsageError, match=text):
                collective.call(comm, torch.ones(elements), asynchronous=asynchronous, out=without)
    for out in (without, torch.ones(elements)):
        with pytest.raises(UsageError, match=text):
            comm.allreduce(without, out=out)
    with pytest.raises(UsageError, match=text):
        comm.send(without, (comm.rank + 1) % comm.size)
    with pytest.raises(UsageError, match=text):
        comm.recv((comm.rank + 1) % comm.size, out=without)
    with pytest.raises(UsageError, match=text):
        comm.named_queue("refusing").allreduce(without, name="x")
    assert not comm.is_broken
    assert comm.allreduce(torch.ones(elements)).sum() == comm.size * elements


def test_elements_that_share_memory_cannot_hold_a_result(comm: Communicator) -> None:
    import torch

    x, wide = np.arange(6.0), np.lib.stride_tricks.as_strided
    twice = [
        (x[:4], wide(np.zeros(1), (4,), (0,))),
        (x, wide(np.zeros(4), (3, 2), (8, 8))),
        (torch.arange(4.0), torch.zeros(1).expand(4)),
    ]
    for given, out in twice:
        for call in (comm.allreduce, comm.broadcast):
            with pytest.raises(UsageError, match="elements of out share memory"):
                call(given, out=out)
    swapped = np.zeros((2, 3, 4)).transpose(1, 0, 2)
    for each in (np.zeros((3, 4))[::2, ::-1], swapped[:, :, 1:2], np.zeros((3, 0)).T):
        given = np.arange(float(each.size)).reshape(each.shape)
        np.testing.assert_array_equal(comm.allreduce(given, out=each), given * comm.size)


def test_arrays_that_do_not_change_are_not_written_to(comm: Communicator) -> None:
    import jax.numpy as jnp
    import tensorflow as tf

    for x in (jnp.arange(4.0), jnp.ones(3, jnp.bfloat16), tf.constant(1.0), tf.constant([1.0, 2.0])):
        before = np.array(x, np.float64)
        calls = {
            "allreduce": lambda x=x: comm.allreduce(x, out=x),
            "asynchronous": lambda x=x: comm.allreduce_async(x, out=x),
            "broadcast": lambda x=x: comm.broadcast(x, out=x),
            "allgather": lambda x=x: comm.allgather(x, out=x),
            "queue": lambda x=x: comm.named_queue("immutable").allreduce(x, out=x, name="x"),
            "recv": lambda x=x: comm.recv(0, out=x),
        }
        for name, call in calls.items():
            with pytest.raises(UsageError, match="do not change"):
                call()
            assert np.array_equal(np.array(x, np.float64), before), name
        np.testing.assert_array_equal(np.array(comm.allreduce(x), np.float64), before * comm.size)


def test_a_part_of_a_storage_that_is_left(comm: Communicator) -> None:
    import torch

    tensor = torch.arange(100.0)
    first, last = tensor[:25], tensor[75:]
    tensor.untyped_storage().resize_(100)
    assert torch.equal(comm.allreduce(first), first * comm.size)
    with pytest.raises(UsageError, match="storage of 100 bytes"):
        comm.allreduce(last)


def test_empty_tensors_need_no_storage(comm: Communicator) -> None:
    import torch

    tensor = torch.ones(8)
    empty = tensor[8:]
    tensor.untyped_storage().resize_(0)
    assert comm.allreduce(empty).shape == (0,)
    assert comm.allgather(torch.empty(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("named", [False, True])
def test_each_operation_reads_what_the_one_before_it_has_written(comm: Communicator, named: bool) -> None:
    queue = comm.named_queue("chain") if named else None

    def start(x: Any, out: Any, number: int) -> Any:
        if queue is not None:
            return queue.allreduce_async(x, out=out, name=f"operation {number}")
        return comm.allreduce_async(x, out=out, priority=number)

    for _ in range(40):
        x, y = np.ones(100, np.float32), np.zeros(100, np.float32)
        whole = np.ones(300, np.float32)
        works = [
            start(x, y, 0),
            start(y, y, 1),
            start(whole[:200], whole[:200], 2),
            start(whole[100:], whole[100:], 3),
            start(y, x, 4),
        ]
        for work in works:
            work.wait()
        size = comm.size
        assert (y == size**2).all()
        assert (x == size**3).all()
        assert (whole[:100] == size).all()
        assert (whole[100:200] == size**2).all()
        assert (whole[200:] == size).all()


@on_ranks(1, 3)
@pytest.mark.parametrize("name", [name for name, one in COLLECTIVES.items() if not one.only_root])
def test_arrays_with_gaps_take_part_in_that_order(comm: Communicator, name: str) -> None:
    import torch

    collective = COLLECTIVES[name]
    for kind in ("numpy", "torch"):
        memory = np.arange(6.0 * comm.size * 2).reshape(6 * comm.size, 2) + comm.rank
        whole: Any = torch.from_numpy(memory) if kind == "torch" else memory
        column = whole[:, 1]
        reduced = collective.call(comm, comm.allreduce(np.ascontiguousarray(memory[:, 1])))
        first = comm.allreduce_async(column, out=column)
        arguments = (comm.size - 1,) if collective.rooted else ()
        second = getattr(comm, f"{name}_async")(column, *arguments)
        gathered = second.wait()
        first.wait()
        assert (gathered is None) == (reduced is None)
        if gathered is not None:
            assert np.array_equal(np.asarray(gathered), np.asarray(reduced))
        # A synchronous one, too, reads what was submitted before it has written.
        other = whole[:, 0]
        expected = collective.call(comm, comm.allreduce(np.ascontiguousarray(memory[:, 0])))
        comm.allreduce_async(other, out=other)
        got = collective.call(comm, other)
        assert got is None or np.array_equal(np.asarray(got), np.asarray(expected))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_results_with_gaps(comm: Communicator, asynchronous: bool) -> None:
    import torch

    for collective in COLLECTIVES.values():
        if not collective.takes_out:
            continue
        x = np.arange(12.0).reshape(6, 2)
        plain = np.asarray(collective.call(comm, x))
        for make in (np.full, torch.full):
            room = make((*plain.shape, 3), -1.0, dtype=np.float64 if make is np.full else torch.float64)
            result = collective.call(comm, x, asynchronous=asynchronous, out=room[..., 1])
            assert np.array_equal(np.asarray(result), plain)
            assert np.array_equal(np.asarray(room[..., 1]), plain)
            assert (np.asarray(room[..., ::2]) == -1).all()
        reverse = np.zeros(plain.shape)[::-1]
        collective.call(comm, x, asynchronous=asynchronous, out=reverse)
        assert np.array_equal(reverse, plain)


def test_negated_views_are_read_and_written(comm: Communicator) -> None:
    import torch

    numbers = torch.view_as_complex(torch.arange(8.0).reshape(4, 2)).conj()
    negated = numbers.imag
    assert negated.is_neg()
    expected = negated.clone() * comm.size
    assert torch.equal(comm.allreduce(negated), expected)
    comm.allreduce_async(negated, out=negated)
    comm.barrier()
    assert torch.equal(negated, expected)


def test_results_of_functional_collectives_and_tensors_without_memory(comm: Communicator) -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Pending(torch.Tensor):
        def trigger_wait(self) -> torch.Tensor:
            return torch.ones(3)

    assert torch.equal(
        comm.allreduce(torch.zeros(3).as_subclass(Pending)), torch.full((3,), float(comm.size))
    )
    with FakeTensorMode():
        fake = torch.ones(3)
    with (
        pytest.warns(UserWarning, match="FakeTensor"),
        pytest.raises(UsageError, match="no memory of its own"),
    ):
        comm.allreduce(fake)
    assert not comm.is_broken


@pytest.mark.parametrize("elements", [500, 200_000])
def test_a_tensor_that_gets_other_memory_in_flight(comm: Communicator, elements: int) -> None:
    import torch

    for number in range(5):
        x, other = torch.ones(elements), torch.full((elements,), 7.0)
        late = comm.allreduce_async(torch.ones(4), name="first") if comm.rank == 0 else None
        work = comm.allreduce_async(x, out=x) if comm.rank == 0 else None
        x.data = other if number % 2 else other.clone()
        bystanders = [np.full(elements, 7.0, np.float32) for _ in range(4)]
        if late is None:
            late = comm.allreduce_async(torch.ones(4), name="first")
            work = comm.allreduce_async(torch.ones(elements))
        assert work is not None
        work.wait()
        late.wait()
        assert all((bystander == 7.0).all() for bystander in bystanders)
        assert (x == 7.0).all()
