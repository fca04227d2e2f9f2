"""Float32 that crosses from host to host in half precision, on ranks that take themselves to be on several
hosts."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import multiring
from multiring import Communicator, UsageError
from multiring.errors import MismatchError
from multiring.numpy import GradientBuckets
from tests.nursery import Nursery
from tests.python.collectives.oracle import narrowed, random_bits, widened
from tests.rank_pool import RankPool
from tests.support import HOSTS, pretend_hosts

WIRES = ("bfloat16", "float16")
# One round, a plan of one segment, several segments.
COUNTS = (1, 1000, 5000, 300_001)

Pools = Callable[[int, int], RankPool]


def inputs_of(comm: Communicator, count: int) -> list[Any]:
    return [random_bits(17 * count + rank, (count,), "float32") for rank in range(comm.size)]


def rounded(values: Any, wire: str) -> Any:
    return widened(narrowed(values, wire), wire)


def expected(comm: Communicator, inputs: list[Any], wire: str) -> Any:
    """With ranks 0 and 2 on one host and 1 on the other, every contribution is rounded alone: 0 and 2 are no
    node of the tree."""
    assert (comm.size, comm.cross_size) in ((2, 2), (3, 2))
    total = rounded(inputs[0], wire) + rounded(inputs[1], wire)
    if comm.size == 3:
        total = total + rounded(inputs[2], wire)
    return rounded(total, wire)


def check_every_form(comm: Communicator) -> None:
    queue = comm.named_queue("q")
    for wire in WIRES:
        for count in COUNTS:
            inputs = inputs_of(comm, count)
            mine, wanted = inputs[comm.rank], expected(comm, inputs, wire)
            x = mine.copy()
            found = [
                comm.allreduce(mine, wire=wire),
                comm.allreduce(x, out=x, wire=wire),
                comm.allreduce_async(mine, wire=wire).wait(),
                queue.allreduce(mine, name=f"{wire}/{count}", wire=wire),
            ]
            strided = np.zeros((count, 2), np.float32)
            strided[:, 0] = mine
            found.append(comm.allreduce(strided[:, 0], wire=wire))
            for result in found:
                assert result.tobytes() == wanted.tobytes(), (wire, count)
    exact = comm.allreduce(inputs_of(comm, 5000)[comm.rank], wire="float32")
    assert exact.tobytes() == comm.allreduce(inputs_of(comm, 5000)[comm.rank]).tobytes()


@pytest.mark.parametrize("layout", [(2, 2), (3, 2)])
def test_every_form_has_the_same_bits(spread: Pools, layout: tuple[int, int]) -> None:
    spread(*layout).run(check_every_form)


def same_everywhere(comm: Communicator) -> list[bytes]:
    x = random_bits(comm.rank, (100_003,), "float32")
    results = [comm.allreduce(x, "average", wire="bfloat16"), comm.allreduce(x, "max", wire="float16")]
    whole = comm.allreduce(x, "average")
    bound = 2.0**-7 * comm.allreduce(np.abs(x), "average") + 1e-30
    assert (np.abs(results[0] - whole) <= bound).all()
    assert not (results[0] == whole).all()
    return [result.tobytes() for result in results]


@pytest.mark.parametrize("layout", [(4, 3), (7, 2), (4, 4)])
def test_all_ranks_have_the_same_bits(spread: Pools, layout: tuple[int, int]) -> None:
    found = spread(*layout).run(same_everywhere)
    assert all(each == found[0] for each in found)


def reduce_gradients(comm: Communicator) -> list[bytes]:
    """Float32 crosses as the reducer is told, other gradients as they are."""
    parameters = {"a": np.zeros(3000, np.float32), "b": np.zeros(50), "c": np.zeros((7, 9), np.float32)}
    buckets = GradientBuckets(parameters, comm, wire="bfloat16", bucket_bytes=8000, postscale=0.5)
    gradients = {n: random_bits(comm.rank, p.shape, p.dtype.name) for n, p in parameters.items()}
    for _ in range(2):
        buckets.zero()
        for name, gradient in gradients.items():
            buckets.ready(name, gradient)
        found = {name: gradient.copy() for name, gradient in buckets.synchronize().items()}
    for name, gradient in gradients.items():
        wire: Any = None if name == "b" else "bfloat16"
        wanted = comm.allreduce(gradient, "average", postscale=0.5, wire=wire)
        assert found[name].tobytes() == wanted.tobytes()
    buckets.close()
    return [gradient.tobytes() for gradient in found.values()]


def test_gradients(spread: Pools) -> None:
    found = spread(3, 2).run(reduce_gradients)
    assert found[0] == found[1] == found[2]


def scale_afterwards(comm: Communicator) -> None:
    """What float16 would lose before it is scaled is lost only where it crosses hosts."""
    gradient = np.full(3, 2.0**-30, np.float32)
    if comm.cross_size > 1:
        with pytest.raises(UsageError, match="postscale is 1e.* cross hosts as float16 are lost"):
            GradientBuckets({"a": gradient}, comm, wire="float16", postscale=1e9)
        return
    buckets = GradientBuckets({"a": gradient}, comm, wire="float16", postscale=2.0**30)
    buckets.ready("a", gradient)
    assert buckets.synchronize()["a"].tolist() == [1, 1, 1]
    buckets.close()


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_scale_that_float16_does_not_survive(spread: Pools, hosts: int) -> None:
    spread(2, hosts).run(scale_afterwards)


def ask_for_what_is_not_there(comm: Communicator) -> None:
    with pytest.raises(UsageError, match="wire is 'int8'; accepted: float32, float16, bfloat16 and None"):
        comm.allreduce(np.ones(3, np.float32), wire="int8")  # type: ignore[arg-type]
    with pytest.raises(
        UsageError, match="only an allreduce of float32 can be sent as another dtype between hosts"
    ):
        comm.allreduce(np.ones(3), wire="float16")
    assert comm.allreduce(np.ones(3), wire="float32")[0] == comm.size
    assert comm.wire == "float32"


def test_what_cannot_be_narrowed_is_refused(spread: Pools) -> None:
    spread(2, 2).run(ask_for_what_is_not_there)


def differ(rank: int) -> None:
    pretend_hosts()
    comm = multiring.init()
    comm.allreduce(np.ones(10, np.float32), name="t", wire="bfloat16" if comm.rank == 1 else None)


@pytest.mark.parametrize("hosts", ["1", "2"])
def test_ranks_that_differ(nursery: Nursery, hosts: str) -> None:
    for outcome in nursery.run(3, differ, init=False, env={HOSTS: hosts}):
        assert isinstance(outcome.error, MismatchError), outcome.trace
        assert "rank 1 asked for allreduce 't' sum comm_dtype bfloat16 float32[10]" in str(outcome.error)
        assert "asked for allreduce 't' sum float32[10]" in str(outcome.error)


def by_environment(rank: int, wire: str, other: str) -> list[bytes]:
    pretend_hosts()
    os.environ["MULTIRING_WIRE"] = wire if rank % 2 == 0 else other
    comm = multiring.init()
    assert comm.wire == wire
    group = comm.split(0)
    assert group is not None
    x = random_bits(rank, (20_000,), "float32")
    named = comm.allreduce(x, wire="bfloat16")
    for result in (comm.allreduce(x), group.allreduce(x)):
        assert result.tobytes() == named.tobytes()
    assert comm.named_queue("q").allreduce(x, name="x").tobytes() == named.tobytes()
    wide = comm.allreduce(x, wire="float32")
    assert not (wide == named).all()
    assert comm.allreduce(np.full(3, 0.1))[0] == sum([0.1] * comm.size)
    return [named.tobytes(), wide.tobytes()]


def test_a_default_for_the_job(nursery: Nursery) -> None:
    outcomes = nursery.run(2, by_environment, "bfloat16", "bfloat16", init=False, env={HOSTS: "2"})
    values = [outcome.value for outcome in outcomes]
    assert values[0] is not None, outcomes[0].trace
    assert values[0] == values[1]


def test_defaults_that_differ(nursery: Nursery) -> None:
    for outcome in nursery.run(2, by_environment, "bfloat16", "float16", init=False, env={HOSTS: "2"}):
        assert isinstance(outcome.error, UsageError), outcome.trace
        assert "MULTIRING_WIRE='" in str(outcome.error)
        assert "it has to be the same on all ranks" in str(outcome.error)
