"""Reductions that may add in any order, in every form of the call, on ranks that take themselves to be on
several hosts. What rings add up: tests/cpp/collective/any_order_test.cpp."""

from __future__ import annotations

import os

import numpy as np
import pytest

import multiring
from multiring import Communicator, MismatchError, UsageError
from multiring.numpy import GradientBuckets
from multiring.tuning.file import only
from tests.nursery import Nursery
from tests.on_ranks import on_ranks
from tests.python.collectives.oracle import random_bits


@on_ranks((4, 2))
def test_every_form_has_the_same_bits(comm: Communicator) -> list[bytes]:
    usual = comm._core.tuning
    # Mirrored exchanges, which may be quicker, keep the canonical order.
    comm._core.set_tuning(only("2px2p") + "\nreduce_scatter 0- 2px2p")
    try:
        return bits_of_every_form(comm)
    finally:
        comm._core.set_tuning(usual)


def bits_of_every_form(comm: Communicator) -> list[bytes]:
    queue, found = comm.named_queue("q"), []
    for count in (1, 20_000):
        mine = np.random.default_rng(comm.rank).normal(size=count).astype(np.float32)
        x, strided = mine.copy(), np.stack([mine, mine], 1)[:, 0]
        results = [
            comm.allreduce(mine, order="any"),
            comm.allreduce(x, out=x, order="any", comm_dtype="float32"),
            comm.allreduce(strided, order="any"),
            comm.allreduce_async(mine, order="any").wait(),
            queue.allreduce(mine, name=f"{count}", order="any"),
        ]
        assert len({each.tobytes() for each in results}) == 1
        canonical = comm.allreduce(mine)
        assert comm.allreduce(mine, order="canonical").tobytes() == canonical.tobytes()
        assert count == 1 or results[0].tobytes() != canonical.tobytes()
        np.testing.assert_allclose(results[0], canonical, rtol=1e-5, atol=1e-5)
        found.append(results[0].tobytes())
    blocks = [
        comm.reduce_scatter(mine, order="any"),
        comm.reduce_scatter_async(mine, order="any").wait(),
        queue.reduce_scatter_async(mine, name="blocks", order="any").wait(),
    ]
    assert len({each.tobytes() for each in blocks}) == 1
    usual = comm.reduce_scatter(mine, order="canonical")
    assert usual.tobytes() == canonical[5000 * comm.rank : 5000 * (comm.rank + 1)].tobytes()
    assert blocks[0].tobytes() != usual.tobytes()
    np.testing.assert_allclose(blocks[0], usual, rtol=1e-5, atol=1e-5)
    return found


@on_ranks((3, 2))
def test_gradients(comm: Communicator) -> bytes:
    gradient = random_bits(comm.rank, (20_000,), "float32")
    buckets = GradientBuckets({"a": gradient}, comm, order="any")
    buckets.ready("a", gradient)
    found = buckets.synchronize()["a"].copy()
    assert found.tobytes() == comm.allreduce(gradient, "average", order="any").tobytes()
    buckets.close()
    return found.tobytes()


@on_ranks(1, 3)
def test_usage(comm: Communicator) -> None:
    x = np.ones(3)
    for call in (comm.allreduce, comm.allreduce_async, comm.reduce_scatter, comm.reduce_scatter_async):
        with pytest.raises(UsageError, match=r"order is 'random'; accepted: canonical, any and None"):
            call(x, order="random")
    for call in (comm.allreduce, comm.allreduce_async):
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'ordr'\. Did you mean 'order'\?"):
            call(x, ordr="any")
    with pytest.raises(UsageError, match="order is 'random'"):
        GradientBuckets({"a": x}, comm, order="random")  # type: ignore[arg-type]


def in_a_ring(rank: int, order: str) -> tuple[float, ...]:
    os.environ.update(MULTIRING_MODE="1x3r", MULTIRING_ORDER=order)
    comm = multiring.init()
    x = np.random.default_rng(rank).normal(size=100_001)
    total, canonical = comm.allreduce(x), comm.allreduce(x, order="canonical")
    assert (total.tobytes() == canonical.tobytes()) == (order == "canonical")
    assert comm.allreduce(x, order="any").tobytes() != canonical.tobytes()
    return tuple(total[:3])


def test_a_ring_for_all_allreduces(nursery: Nursery) -> None:
    for order in ("any", "canonical"):
        first, *others = nursery.values(3, in_a_ring, order, init=False, hosts=3)
        assert others == [first] * 2


def in_the_order_of_the_job(rank: int, by_name: bool) -> None:
    if rank == 1:
        os.environ["MULTIRING_ORDER"] = "any"
    comm = multiring.init()
    if by_name:
        comm.named_queue("q").allreduce(np.ones(3), name="a")
    else:
        comm.allreduce(np.ones(3))


@pytest.mark.parametrize("by_name", [False, True])
def test_another_order_of_a_rank_is_an_error(nursery: Nursery, by_name: bool) -> None:
    """Also on one host, where it changes no bit: there would be no error before the job runs on several."""
    for outcome in nursery.run(3, in_the_order_of_the_job, by_name, init=False):
        outcome.check_raised(
            MismatchError,
            "sum float64[3]",
            "rank 1 asked for ",
            "sum in any order float64[3]",
            "compare MULTIRING_ORDER and the arguments",
        )
