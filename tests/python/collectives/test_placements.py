"""Where the ranks of a job are makes no difference to what it computes."""

from __future__ import annotations

import hashlib
import importlib

import numpy as np
import pytest

from multiring import Communicator
from tests.nursery import Nursery
from tests.python.collectives.oracle import Reduction, random_bits
from tests.python.collectives.test_several_hosts import check_all

# The host of each rank.
IRREGULAR = [(0, 1, 1, 1), (0, 0, 1, 2, 2)]
OF_FIVE = [(0, 0, 0, 0, 0), (0, 1, 1, 1, 1), (0, 0, 1, 2, 2), (0, 1, 2, 0, 1), (0, 1, 2, 3, 4)]
# In rounds, at the edge to plans, and by plans of one and of several segments.
COUNTS = (0, 1, 1001, 4095, 4097, 8193, 25_601, 1_200_007)


def name_of(places: tuple[int, ...]) -> str:
    return "".join(map(str, places))


@pytest.mark.parametrize("places", IRREGULAR, ids=name_of)
def test_every_collective(nursery: Nursery, places: tuple[int, ...]) -> None:
    nursery.values(len(places), check_all, hosts=places, timeout=200.0)


def digests(comm: Communicator, dtype: str) -> list[str]:
    found = []
    for count in COUNTS:
        bits = random_bits(count + comm.rank, (count,), dtype)
        values = bits
        if dtype == "bfloat16":
            values = bits.view(importlib.import_module("ml_dtypes").bfloat16)
        for op in ("sum", "average"):
            for result in (comm.allreduce(values, op), comm.allreduce_async(values, op).wait()):
                found.append(hashlib.sha256(result.tobytes()).hexdigest())
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("places", OF_FIVE, ids=name_of)
def test_the_same_bits(nursery: Nursery, places: tuple[int, ...], dtype: str) -> None:
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="NumPy has no bfloat16 of its own")
    wanted = []
    for count in COUNTS:
        inputs = [random_bits(count + rank, (count,), dtype) for rank in range(5)]
        for op in ("sum", "average"):
            result = Reduction(op).apply(inputs, dtype)
            wanted += [hashlib.sha256(np.ascontiguousarray(result).tobytes()).hexdigest()] * 2
    for value in nursery.values(5, digests, dtype, hosts=places):
        assert value == wanted
