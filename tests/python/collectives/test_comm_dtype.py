"""Float32 that crosses from host to host in half precision, on ranks that take themselves to be on several
hosts."""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np
import pytest

import multiring
from multiring import Communicator, UsageError
from multiring.numpy import GradientBuckets
from tests.nursery import Nursery
from tests.on_ranks import on_ranks
from tests.python.collectives.oracle import narrowed, random_bits, widened


def rounded(values: Any, comm_dtype: str) -> Any:
    return widened(narrowed(values, comm_dtype), comm_dtype)


@on_ranks((2, 2))
def test_every_form_has_the_same_bits(comm: Communicator) -> None:
    queue = comm.named_queue("q")
    for comm_dtype, count in itertools.product(("bfloat16", "float16"), (1, 5000)):  # a round, a segment
        inputs = [random_bits(17 * count + rank, (count,), "float32") for rank in range(comm.size)]
        mine = inputs[comm.rank]
        wanted = rounded(rounded(inputs[0], comm_dtype) + rounded(inputs[1], comm_dtype), comm_dtype)
        x, strided = mine.copy(), np.stack([mine, mine], 1)[:, 0]
        for result in (
            comm.allreduce(mine, comm_dtype=comm_dtype),
            comm.allreduce(x, out=x, comm_dtype=comm_dtype),
            comm.allreduce(strided, comm_dtype=comm_dtype),
            comm.allreduce_async(mine, comm_dtype=comm_dtype).wait(),
            queue.allreduce(mine, name=f"{comm_dtype}/{count}", comm_dtype=comm_dtype),
        ):
            assert result.tobytes() == wanted.tobytes(), (comm_dtype, count)
    assert comm.comm_dtype == "float32"
    assert comm.allreduce(mine, comm_dtype="float32").tobytes() == (inputs[0] + inputs[1]).tobytes()


@on_ranks((3, 2))
def test_gradients(comm: Communicator) -> list[bytes]:
    """Float32 crosses as the reducer is told, other gradients as they are."""
    parameters = {"a": np.zeros(3000, np.float32), "b": np.zeros(50), "c": np.zeros((7, 9), np.float32)}
    buckets = GradientBuckets(parameters, comm, comm_dtype="bfloat16", bucket_bytes=8000, postscale=0.5)
    gradients = {n: random_bits(comm.rank, p.shape, p.dtype.name) for n, p in parameters.items()}
    for _ in range(2):
        buckets.zero()
        for name, gradient in gradients.items():
            buckets.ready(name, gradient)
        found = {name: gradient.copy() for name, gradient in buckets.synchronize().items()}
    for name, gradient in gradients.items():
        comm_dtype: Any = None if name == "b" else "bfloat16"
        wanted = comm.allreduce(gradient, "average", postscale=0.5, comm_dtype=comm_dtype)
        assert found[name].tobytes() == wanted.tobytes()
    buckets.close()
    return [gradient.tobytes() for gradient in found.values()]


@on_ranks((2, 1), (2, 2))
def test_a_scale_that_float16_does_not_survive(comm: Communicator) -> None:
    """What float16 would lose before it is scaled is lost only where it crosses hosts."""
    gradient = np.full(3, 2.0**-30, np.float32)
    if comm.cross_size > 1:
        with pytest.raises(UsageError, match="postscale is 1e.* cross hosts as float16 are lost"):
            GradientBuckets({"a": gradient}, comm, comm_dtype="float16", postscale=1e9)
        return
    buckets = GradientBuckets({"a": gradient}, comm, comm_dtype="float16", postscale=2.0**30)
    buckets.ready("a", gradient)
    assert buckets.synchronize()["a"].tolist() == [1, 1, 1]
    buckets.close()


def by_environment(rank: int, comm_dtype: str, other: str) -> list[bytes]:
    os.environ["MULTIRING_COMM_DTYPE"] = comm_dtype if rank % 2 == 0 else other
    comm = multiring.init()
    assert comm.comm_dtype == comm_dtype
    group = comm.split(0)
    x = random_bits(rank, (20_000,), "float32")
    named = comm.allreduce(x, comm_dtype="bfloat16")
    for by_default in (comm.allreduce(x), group.allreduce(x), comm.named_queue("q").allreduce(x, name="x")):
        assert by_default.tobytes() == named.tobytes()
    return [named.tobytes()]


def test_a_default_for_the_job(nursery: Nursery) -> None:
    values = nursery.values(2, by_environment, "bfloat16", "bfloat16", init=False, hosts=2)
    assert values[0] == values[1]


def test_defaults_that_differ(nursery: Nursery) -> None:
    for outcome in nursery.run(2, by_environment, "bfloat16", "float16", init=False, hosts=2):
        outcome.check_raised(UsageError, "MULTIRING_COMM_DTYPE='", "it has to be the same on all ranks")
