"""The shared reducer under generated models, orders of arrival and missing gradients, against a plain sum."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
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
from multiring.gradients.reducer import GradientReducer
from multiring.gradients.source import IN_SLOT, InPlace
from tests.on_ranks import on_ranks
from tests.rank_pool import RankPool

Pool = Callable[[int], RankPool]
RANKS = 3
DTYPES = ("float16", "float32", "float64")


class Source:
    """Gradients of one rank, some in their slots: small integers, so that every dtype adds them without
    rounding."""

    def __init__(self, comm: Communicator, specs: list[ParameterSpec], options: ReducerOptions) -> None:
        self.reducer = GradientReducer(comm, specs, options, self)
        self.begin([])

    def begin(self, elsewhere: Collection[int]) -> None:
        self.elsewhere = elsewhere
        self.values: dict[int, float] = {}
        self.published: list[int] = []
        self.arrays: dict[int, np.ndarray[Any, Any]] = {}

    def write(self, index: int, value: float) -> InPlace:
        spec = self.reducer.specs[index]
        if index not in self.elsewhere:
            self.reducer.slot(index).view(spec.dtype)[:] = value
            return IN_SLOT
        array = self.arrays[index] = np.full(spec.shape, value, spec.dtype)
        return InPlace(array.ctypes.data, array)

    def read(self, index: int) -> np.ndarray[Any, Any]:
        if index in self.arrays:
            return self.arrays[index]
        found: np.ndarray[Any, Any] = self.reducer.slot(index).view(self.reducer.specs[index].dtype)
        return found

    def locate(self, index: int, is_ready: bool) -> InPlace | None:
        return self.write(index, self.values[index]) if index in self.values else None

    def publish(self, index: int) -> None:
        self.published.append(index)


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
    limits = draw(st.tuples(st.integers(1, 400), st.integers(1, 400)))
    return {
        "sizes": sizes,
        "rounds": rounds,
        "limits": limits,
        "op": draw(st.sampled_from(("average", "sum"))),
    }


def value_of(number: int, rank: int, index: int) -> float:
    return float(6 * (1 + (number + 2 * rank + 3 * index) % 7))


def reduce_in_rounds(comm: Communicator, job: dict[str, Any]) -> list[Any]:
    specs = [ParameterSpec(f"p{k}", (size,), dtype) for k, (size, dtype) in enumerate(job["sizes"])]
    options = ReducerOptions(job["op"], *job["limits"])
    source = Source(comm, specs, options)
    reducer = source.reducer
    plans = []
    for number, ranks in enumerate(job["rounds"]):
        mine = ranks[comm.rank]
        source.begin(mine["elsewhere"])
        for index in mine["late"]:
            source.values[index] = value_of(number, comm.rank, index)
            reducer.mark_produced(index)
        for index in mine["arrive"]:
            source.values[index] = value_of(number, comm.rank, index)
            reducer.mark_ready(index)
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
    specs = [ParameterSpec(name, (3,), "float32") for name in ("a", "b")]
    array = np.ones(3, np.float32)

    class OneArray(Source):
        def write(self, index: int, value: float) -> InPlace:
            return InPlace(array.ctypes.data, array)

    source = OneArray(comm, specs, ReducerOptions())
    source.values = {0: 1.0, 1: 1.0}
    source.reducer.mark_ready(0)
    with pytest.raises(UsageError, match="'a' and 'b' have the same array"):
        source.reducer.mark_ready(1)
    source.reducer.close()


@pytest.mark.parametrize(("data", "every"), [("same", None), ("same", 0), ("own", None), ("zeros", None)])
def test_the_same_data_on_all_ranks_is_told_once(comm: Communicator, data: str, every: int | None) -> None:
    specs = [ParameterSpec(name, (3,), "float32") for name in ("a", "b")]
    source = Source(comm, specs, ReducerOptions(bucket_bytes=1, first_bucket_bytes=1, check_every=every))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            source.begin([1])
            b = {"same": 2.0, "own": 2.0 + comm.rank, "zeros": 0.0}[data]
            source.values = {0: 0.0 if data == "zeros" else 1.0, 1: b}
            source.reducer.mark_ready(0)
            source.reducer.finish()
    source.reducer.close()
    texts = [
        str(one.message) for one in told if "most likely each trains on the same data" in str(one.message)
    ]
    assert len(texts) == (comm.rank == 0 and data == "same" and every is None)


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
