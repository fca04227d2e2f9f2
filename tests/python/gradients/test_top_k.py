"""Gradients of which only the largest entries travel: by the description, step by step, and in training."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

import multiring.gradients.top_k as implementation
from multiring import Communicator, TopK
from multiring.errors import MismatchError, UsageError
from multiring.gradients.bucketing import ParameterSpec
from multiring.gradients.options import ReducerOptions
from multiring.gradients.reducer import GradientReducer
from multiring.gradients.source import IN_SLOT, InPlace
from multiring.gradients.top_k import add_up, largest
from tests.on_ranks import on_ranks
from tests.python.collectives.oracle import Reduction, random_bits
from tests.rank_pool import RankPool

Pool = Callable[[int], RankPool]
Values = NDArray[Any]

SIZES = (7, 0, 300, 64, 1, 40)
LIMITS = (600, 300)  # bytes: several buckets


def test_the_largest_entries() -> None:
    def chosen(values: list[float], count: int) -> list[int]:
        return [int(place) for place in largest(np.array(values, np.float32), count)]

    assert chosen([1, -3, 2, 0], 1) == [1]
    assert chosen([1, -3, 2, 0], 3) == [0, 1, 2]
    assert chosen([1, -3, 2, 0], 4) == [0, 1, 2, 3]
    assert chosen([], 0) == []
    assert chosen([2, -2, 2, 2], 2) == [0, 1], "the first of equal ones"
    assert chosen([0, 0, 0], 2) == [0, 1]
    assert chosen([5, np.inf, np.nan, 7], 2) == [1, 2]
    assert chosen([np.nan, 5, np.nan, -np.inf], 2) == [0, 2]


def test_what_was_sent_is_added_in_the_canonical_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "_BLOCK", 64)  # several blocks
    generator = np.random.default_rng(3)
    for ranks in (2, 3, 7):
        dense = [random_bits(rank, (200,), "float32") for rank in range(ranks)]
        places = [np.sort(generator.choice(200, 50, replace=False)) for _ in range(ranks)]
        sparse = []
        for values, mine in zip(dense, places, strict=True):
            sparse.append(np.zeros(200, np.float32))
            sparse[-1][mine] = values[mine]
        for op in ("sum", "average"):
            found = add_up(places, [d[mine] for d, mine in zip(dense, places, strict=True)], 200, op)
            assert found.tobytes() == Reduction(op).apply(sparse, "float32").tobytes()


class Step:
    """What the ranks do in one round, the same for all who ask; `Source` is one of them."""

    def __init__(self, number: int, ranks: int) -> None:
        generator = np.random.default_rng(number)
        # Nobody has a new gradient of parameter 3 but in the last rounds.
        present = generator.random((ranks, len(SIZES))) < 0.7
        present[:, 3] &= number > 3
        self.present = [np.flatnonzero(row).tolist() for row in present]
        self.gradients = [
            [
                random_bits(1000 * number + 10 * index + rank, (size,), "float32")
                for index, size in enumerate(SIZES)
            ]
            for rank in range(ranks)
        ]


class Source:
    """The gradients of one rank, every other one in an array of its own."""

    def __init__(self, comm: Communicator, specs: list[ParameterSpec], options: ReducerOptions) -> None:
        self.reducer = GradientReducer(comm, specs, options, self)
        self.begin([], ())

    def begin(self, gradients: list[Values], late: Collection[int]) -> None:
        self.gradients, self.late = gradients, late
        self.arrays: dict[int, Values] = {}

    def read(self, index: int) -> Values:
        return self.arrays[index] if index in self.arrays else self.reducer.slot(index).view(np.float32)

    def locate(self, index: int, is_ready: bool) -> InPlace | None:
        if not self.gradients:  # they have been written to the slots
            return IN_SLOT if is_ready else None
        if not is_ready and index not in self.late:
            return None
        if index % 2:
            self.reducer.slot(index).view(np.float32)[:] = self.gradients[index]
            return IN_SLOT
        array = self.arrays[index] = self.gradients[index].copy()
        return InPlace(array.ctypes.data, array)

    def publish(self, index: int) -> None:
        pass


def split(values: Values, indices: list[int]) -> list[Values]:
    return np.split(values, np.cumsum([SIZES[index] for index in indices])[:-1])


class Expected:
    """All ranks by the description: gradient + residual is sent or stays, and nothing else happens to it."""

    def __init__(self, ranks: int, compression: TopK, scaling: Reduction) -> None:
        self.compression, self.scaling = compression, scaling
        self.residuals = [[np.zeros(size, np.float32) for size in SIZES] for _ in range(ranks)]

    def reduce(self, step: Step, buckets: list[list[int]]) -> dict[int, Values]:
        """The reduced gradients of those parameters that any rank has produced."""
        produced = set().union(*step.present)
        reduced: dict[int, Values] = {}
        for indices in buckets:
            messages = []
            for rank, mine in enumerate(step.present):
                have = [
                    (step.gradients[rank][index] if index in mine else np.zeros(SIZES[index], np.float32))
                    * np.float32(self.scaling.prescale)
                    + (self.residuals[rank][index] if index in mine else np.float32(0))
                    for index in indices
                ]
                together = np.concatenate(have)
                count = int(np.ceil(self.compression.ratio * len(together)))
                places = np.argsort(-np.abs(together), kind="stable")[:count]
                message = np.zeros_like(together)
                message[places] = together[places]
                rest = together - message
                assert ((message + rest) == together).all()
                messages.append(message)
                for index, part in zip(indices, split(rest, indices), strict=True):
                    if index in mine:
                        self.residuals[rank][index] = part
            total = Reduction(self.scaling.op, 1.0, self.scaling.postscale).apply(messages, "float32")
            parts = zip(indices, split(total, indices), strict=True)
            reduced |= {index: part for index, part in parts if index in produced}
        return reduced


def follow_the_description(
    comm: Communicator, ratio: float, op: Literal["average", "sum"], prescale: float, postscale: float
) -> None:
    specs = [ParameterSpec(f"p{k}", (size,), "float32") for k, size in enumerate(SIZES)]
    compression = TopK(ratio)
    options = ReducerOptions(op, *LIMITS, prescale, postscale, compression=compression)
    source = Source(comm, specs, options)
    reducer = source.reducer
    expected = Expected(comm.size, compression, Reduction(op, prescale, postscale))
    for number in range(7):
        step = Step(number, comm.size)
        mine = step.present[comm.rank]
        early, late = mine[::2], mine[1::2]
        source.begin(step.gradients[comm.rank], late)
        wanted = expected.reduce(step, [[slot.index for slot in b.slots] for b in reducer.plan.buckets])
        for index in late:
            reducer.mark_produced(index)
        for index in early:
            reducer.mark_ready(index)
        result = reducer.finish()
        assert set(np.flatnonzero(result.produced)) == set(wanted)
        assert result.active.all()
        for index, values in wanted.items():
            assert source.read(index).tobytes() == values.tobytes(), (number, index)
        kept = reducer.residuals()
        for index, spec in enumerate(specs):
            found = kept.get(spec.name, np.zeros(SIZES[index], np.float32))
            np.testing.assert_array_equal(found, expected.residuals[comm.rank][index])
        if number == 3:  # as a checkpoint is taken up
            reducer.load_residuals({})
            assert reducer.residuals() == {}
            reducer.load_residuals(kept)
    reducer.close()


@pytest.mark.parametrize(
    ("ratio", "scaling"), [(0.1, ("average", 1.0, 1.0)), (0.003, ("sum", 0.5, 3.0))], ids=["tenth", "least"]
)
def test_every_step_follows_the_description(
    ranks: Pool, ratio: float, scaling: tuple[str, float, float]
) -> None:
    ranks(3).run(follow_the_description, ratio, *scaling)


@on_ranks(1, 3)
def test_a_ratio_of_one_has_the_bits_of_the_dense_sum(comm: Communicator) -> None:
    """All entries are sent: the bits of the dense reduction."""
    for dtype in ("float32", "float64"):
        specs = [ParameterSpec(f"p{k}", (size,), dtype) for k, size in enumerate(SIZES)]
        found = []
        for compression in (None, TopK(1.0)):
            options = ReducerOptions("average", *LIMITS, 0.3, 1.7, compression=compression)
            source = Source(comm, specs, options)
            reducer = source.reducer
            for index, size in enumerate(SIZES):
                gradient = random_bits(index + 100 * comm.rank, (size,), dtype)
                reducer.slot(index).view(dtype)[:] = gradient
                reducer.mark_ready(index)
            reducer.finish()
            found.append([reducer.slot(index).tobytes() for index in range(len(SIZES))])
            assert not any(rest.any() for rest in reducer.residuals().values())
            reducer.close()
        assert found[0] == found[1]


@on_ranks(3)
def test_ranks_that_run_out_of_data_send_zeros(comm: Communicator) -> None:
    """Rank 1 has data for one step, the others for two."""
    spec = ParameterSpec("p", (6,), "float32")
    source = Source(comm, [spec], ReducerOptions(compression=TopK(0.5)))
    reducer = source.reducer
    # What is kept back of the first step, (0, 0, 0, 3, 2, 1), makes the fourth entry one of the largest then.
    steps = [[6, 5, 4, 0, 0, 0], [6, 5, 0, 6, 0, 0]]
    for wanted in steps[:1] if comm.rank == 1 else steps:
        reducer.slot(0).view(np.float32)[:] = [6, 5, 4, 3, 2, 1]
        reducer.mark_ready(0)
        reducer.finish()
        np.testing.assert_array_equal(reducer.slot(0).view(np.float32), np.float32(wanted))
    before = reducer.residuals()
    assert before["p"].tolist() == ([0, 0, 0, 3, 2, 1] if comm.rank == 1 else [0, 0, 4, 0, 4, 2])
    reducer.join()
    assert before["p"].tobytes() == reducer.residuals()["p"].tobytes()
    reducer.close()


def test_what_is_not_finite_is_sent_and_not_kept(comm: Communicator) -> None:
    options = ReducerOptions(compression=TopK(0.25))
    source = Source(comm, [ParameterSpec("p", (4,), "float32")], options)
    reducer = source.reducer
    reducer.slot(0).view(np.float32)[:] = [np.inf, np.nan, np.inf, 1] if comm.rank == 0 else [1, 2, 3, 4]
    reducer.mark_ready(0)
    reducer.finish()
    assert np.isinf(reducer.slot(0).view(np.float32)[0])
    kept = reducer.residuals()["p"].tolist()
    assert kept == ([0, 0, 0, 1] if comm.rank == 0 else [1, 2, 3, 0])
    reducer.close()


def test_what_cannot_be_is_refused(comm: Communicator) -> None:
    for ratio in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(UsageError, match="the part that is sent is more than 0 and at most 1"):
            TopK(ratio)
    specs = [ParameterSpec("p", (4,), "float32"), ParameterSpec("h", (4,), "bfloat16")]
    with pytest.raises(UsageError, match="gradients of 'h' are bfloat16; TopK takes float32 and float64"):
        Source(comm, specs, ReducerOptions(compression=TopK(0.1)))
    with pytest.raises(UsageError, match="gradients take one of them"):
        Source(comm, specs[:1], ReducerOptions(compression=TopK(0.1), comm_dtype="float16"))
    with pytest.raises(MismatchError, match=r"'options' .*ratio.: 0.1.* on rank 0, but"):
        Source(comm, specs[:1], ReducerOptions(compression=TopK(0.1 + 0.1 * comm.rank)))
    reducer = Source(comm, specs[:1], ReducerOptions(compression=TopK(0.1))).reducer
    with pytest.raises(UsageError, match=r"a residual of 'p' with 3 elements .* has 4 elements"):
        reducer.load_residuals({"p": np.zeros(3)})
    with pytest.raises(UsageError, match="the model has no such parameter"):
        reducer.load_residuals({"q": np.zeros(3)})
    reducer.close()


def test_a_parameter_that_is_unused_takes_no_place(comm: Communicator) -> None:
    """What is kept back of a parameter that is not used any more takes nobody's place."""
    specs = [ParameterSpec(name, (10,), "float32") for name in ("unused", "used")]
    options = ReducerOptions("sum", compression=TopK(0.1))
    source = Source(comm, specs, options)
    reducer = source.reducer
    source.begin([np.full(10, 1000, np.float32), np.ones(10, np.float32)], [])
    assert reducer.plan.buckets[0].slots[1:], "one bucket holds both"
    for index in (0, 1):
        reducer.mark_ready(index)
    reducer.finish()
    kept = reducer.residuals()["unused"].copy()
    arrived = np.zeros(10, np.float32)
    with np.errstate(all="raise"):
        for _ in range(30):
            reducer.mark_ready(1)
            assert reducer.finish().produced.tolist() == [False, True]
            arrived += source.read(1)
    assert (reducer.residuals()["unused"] == kept).all()
    assert arrived.sum() + comm.size * reducer.residuals()["used"].sum() == comm.size * 10 * 31
    assert (arrived > 0).all()
