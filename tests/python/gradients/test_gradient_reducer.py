"""The shared reducer under generated models, orders of arrival and missing gradients, against a plain sum."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from multiring import Communicator
from multiring.errors import MismatchError, UsageError
from multiring.gradients.bucketing import ParameterSpec
from multiring.gradients.model_check import check_same
from multiring.gradients.options import ReducerOptions
from multiring.gradients.source import Gradient
from tests.on_ranks import Pool, all_raise, on_ranks
from tests.python.gradients.support import Source

RANKS = 3
DTYPES = ("float16", "float32", "float64")
AB = [ParameterSpec(name, (3,), "float32") for name in ("a", "b")]


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    """A model and, per round and rank, what arrives in order and what is fetched at the end."""
    sizes = draw(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), min_size=1, max_size=8))
    every = list(range(len(sizes)))
    rounds = []
    for _ in range(draw(st.integers(1, 4))):
        ranks = []
        for _ in range(RANKS):
            order = draw(st.permutations(every))
            cuts = sorted((draw(st.integers(0, len(every))), draw(st.integers(0, len(every)))))
            elsewhere = draw(st.sets(st.sampled_from(every)))
            arrive, late = order[: cuts[0]], order[cuts[0] : cuts[1]]
            ranks.append({"arrive": arrive, "late": late, "elsewhere": elsewhere})
        rounds.append(ranks)
    limit = draw(st.integers(1, 400))
    op = draw(st.sampled_from(("average", "sum")))
    return {"sizes": sizes, "rounds": rounds, "limit": limit, "op": op}


def value_of(number: int, rank: int, index: int) -> float:
    """Small integers, so that every dtype adds them without rounding."""
    return float(6 * (1 + (number + 2 * rank + 3 * index) % 7))


def reduce_in_rounds(comm: Communicator, job: dict[str, Any]) -> list[Any]:
    specs = [ParameterSpec(f"p{k}", (size,), dtype) for k, (size, dtype) in enumerate(job["sizes"])]
    options = ReducerOptions(op=job["op"], bucket_bytes=job["limit"])
    source = Source(comm, specs, options)
    reducer = source.reducer
    plans = []
    for number, ranks in enumerate(job["rounds"]):
        mine = ranks[comm.rank]
        source.begin({}, mine["elsewhere"])
        for what, mark in (("late", reducer.mark_pending), ("arrive", reducer.mark_ready)):
            for index in mine[what]:
                spec = specs[index]
                source.gradients[index] = np.full(spec.shape, value_of(number, comm.rank, index), spec.dtype)
                mark(index)
        result = reducer.finish()
        for index, spec in enumerate(specs):
            who = [rank for rank in range(comm.size) if index in ranks[rank]["arrive"] + ranks[rank]["late"]]
            assert result.produced[index] == bool(who)
            if who:
                total = sum(value_of(number, rank, index) for rank in who)
                wanted = total / comm.size if job["op"] == "average" else total
                np.testing.assert_array_equal(source.read(index), np.dtype(spec.dtype).type(wanted))
        missing = set(range(len(specs))) - set(mine["arrive"]) - set(mine["late"])
        assert sorted(source.published) == sorted(index for index in missing if result.produced[index])
        assert result.active.all()
        assert not reducer.has_unreduced
        plans.append(reducer.plan)
    reducer.close()
    return plans


# The examples share the pool of ranks, on purpose; each is a few milliseconds of several processes.
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(job=jobs())
def test_any_order_of_arrival_and_any_gradient_missing(ranks: Pool, job: dict[str, Any]) -> None:
    results = ranks(RANKS).run(reduce_in_rounds, job)
    assert results[0] == results[1] == results[2], "ranks have different plans"


def test_an_array_cannot_be_two_gradients(comm: Communicator) -> None:
    array = np.ones(3, np.float32)

    class OneArray(Source):
        def fetch(self, index: int) -> Gradient | None:
            return Gradient(array.ctypes.data, array)

    source = OneArray(comm, AB, ReducerOptions())
    source.reducer.mark_ready(0)
    with pytest.raises(UsageError, match="'a' and 'b' have the same array"):
        source.reducer.mark_ready(1)
    source.reducer.close()


@pytest.mark.parametrize(("data", "every"), [("same", None), ("same", 0), ("own", None), ("zeros", None)])
def test_the_same_data_on_all_ranks_is_told_once(comm: Communicator, data: str, every: int | None) -> None:
    source = Source(comm, AB, ReducerOptions(bucket_bytes=1, check_every=every))
    a = float(data != "zeros")
    b = {"same": 2.0, "own": 2.0 + comm.rank, "zeros": 0.0}[data]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            source.begin({0: np.full(3, a, np.float32), 1: np.full(3, b, np.float32)}, [1])
            source.reducer.mark_ready(0)
            source.reducer.finish()
    source.reducer.close()
    files = [one.filename for one in told if "most likely each trains on the same data" in str(one.message)]
    assert files == [__file__] * (comm.rank == 0 and data == "same" and every is None), "at a line of its own"


@on_ranks(RANKS)
@all_raise(MismatchError, "model check")
def test_a_check_meets_no_object_of_the_program(comm: Communicator) -> None:
    if comm.rank == 0:
        check_same(comm, [("a", "1")], "words")
    else:
        comm.allgather_object(None)


@on_ranks(RANKS)
def test_the_first_difference_is_named(comm: Communicator) -> None:
    check_same(comm, [], "words")
    check_same(comm, [("a", "1")], "words")
    for lists, text in (
        ([[("a", "1")], [("a", "2")], [("a", "1")]], "entry 0 is 'a' 1 on ranks 0, 2, but 'a' 2 on rank 1"),
        ([[("a", "1")], [("a", "1")], []], "entry 0 is 'a' 1 on ranks 0, 1, but nothing on rank 2"),
        (
            [[("a", ""), (last, "")] for last in "bcd"],
            "entry 1 is 'b' on rank 0, but 'c' on rank 1, but 'd' on rank 2",
        ),
    ):
        with pytest.raises(MismatchError, match=text):
            check_same(comm, lists[comm.rank], "words")
