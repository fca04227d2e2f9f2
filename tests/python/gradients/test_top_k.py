"""Gradients of which only the largest entries travel: by the description, step by step, and in training."""

from __future__ import annotations

import numpy as np
import pytest

import multiring.gradients.top_k as implementation
from multiring import Communicator, TopK
from multiring.errors import MismatchError, UsageError
from multiring.gradients.bucketing import ParameterSpec
from multiring.gradients.options import ReducerOptions
from multiring.gradients.top_k import add_up, largest
from tests.on_ranks import on_ranks
from tests.python.collectives.oracle import Reduction, random_bits
from tests.python.gradients.support import Source, Values

SIZES = (7, 0, 300, 64, 1, 40)
LIMIT = 300  # bytes: several buckets
SCALINGS = [(0.1, Reduction("average")), (0.003, Reduction("sum", 0.5, 3.0))]


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
        indices = [np.sort(generator.choice(200, 50, replace=False)) for _ in range(ranks)]
        sparse = []
        for values, mine in zip(dense, indices, strict=True):
            sparse.append(np.zeros(200, np.float32))
            sparse[-1][mine] = values[mine]
        for op in ("sum", "average"):
            found = add_up(indices, [d[mine] for d, mine in zip(dense, indices, strict=True)], 200, op)
            assert found.tobytes() == Reduction(op).apply(sparse, "float32").tobytes()


def produced_in(number: int, ranks: int) -> list[dict[int, Values]]:
    """The gradients of each rank in a round; nobody has one of parameter 3 but in the last rounds."""
    generator = np.random.default_rng(number)
    present = generator.random((ranks, len(SIZES))) < 0.7
    present[:, 3] &= number > 3
    return [
        {
            index: random_bits(1000 * number + 10 * index + rank, (SIZES[index],), "float32")
            for index in np.flatnonzero(present[rank]).tolist()
        }
        for rank in range(ranks)
    ]


def split(values: Values, indices: list[int]) -> list[Values]:
    return np.split(values, np.cumsum([SIZES[index] for index in indices])[:-1])


def by_description(
    gradients: list[dict[int, Values]],
    produced: set[int],
    residuals: list[list[Values]],
    buckets: list[list[int]],
    ratio: float,
    scaling: Reduction,
) -> dict[int, Values]:
    """Gradient + residual is sent or stays, and nothing else happens to it."""
    reduced: dict[int, Values] = {}
    for indices in buckets:
        messages = []
        for mine, kept in zip(gradients, residuals, strict=True):
            zeros = {index: np.zeros(SIZES[index], np.float32) for index in indices}
            have = {k: g * np.float32(scaling.prescale) + kept[k] for k, g in mine.items() if k in zeros}
            together = np.concatenate(list((zeros | have).values()))
            count = int(np.ceil(ratio * len(together)))
            chosen = np.argsort(-np.abs(together), kind="stable")[:count]
            messages.append(np.zeros_like(together))
            messages[-1][chosen] = together[chosen]
            for index, part in zip(indices, split(together - messages[-1], indices), strict=True):
                if index in mine and index in produced:
                    kept[index] = part
        total = Reduction(scaling.op, 1.0, scaling.postscale).apply(messages, "float32")
        reduced |= zip(indices, split(total, indices), strict=True)
    return {index: part for index, part in reduced.items() if index in produced}


@on_ranks(3)
@pytest.mark.parametrize(("ratio", "scaling"), SCALINGS)
def test_every_step_follows_the_description(comm: Communicator, ratio: float, scaling: Reduction) -> None:
    specs = [ParameterSpec(f"p{k}", (size,), "float32") for k, size in enumerate(SIZES)]
    options = ReducerOptions(
        op=scaling.op,
        bucket_bytes=LIMIT,
        prescale=scaling.prescale,
        postscale=scaling.postscale,
        compression=TopK(ratio),
    )
    source = Source(comm, specs, options)
    reducer = source.reducer
    residuals = [[np.zeros(size, np.float32) for size in SIZES] for _ in range(comm.size)]
    last: dict[int, Values] = {}
    for number in range(7):
        new = produced_in(number, comm.size)
        buckets = [[slot.index for slot in bucket.slots] for bucket in reducer.plan.buckets]
        keeps = np.random.default_rng(100 + number).random((comm.size, len(SIZES))) < 0.5
        gradients = [
            {k: v for k, v in last.items() if keeps[rank, k]} | mine for rank, mine in enumerate(new)
        ]
        gradients = [dict(sorted(mine.items())) for mine in gradients]
        wanted = by_description(gradients, set().union(*new), residuals, buckets, ratio, scaling)
        last |= wanted
        mine = list(new[comm.rank])
        source.begin(gradients[comm.rank], range(0, len(SIZES), 2))
        for index in mine[1::2]:
            reducer.mark_pending(index)
        for index in mine[::2]:
            reducer.mark_ready(index)
        result = reducer.finish()
        assert set(np.flatnonzero(result.produced)) == set(wanted)
        assert result.active.all()
        for index, values in wanted.items():
            assert source.read(index).tobytes() == values.tobytes(), (number, index)
        kept = reducer.residuals()
        for spec, rest in zip(specs, residuals[comm.rank], strict=True):
            np.testing.assert_array_equal(kept.get(spec.name, np.zeros_like(rest)), rest)
        if number == 3:  # as a checkpoint is taken up
            reducer.load_residuals({})
            assert reducer.residuals() == {}
            reducer.load_residuals(kept)
    reducer.close()


@on_ranks(1, 3)
def test_a_ratio_of_one_has_the_bits_of_the_dense_sum(comm: Communicator) -> None:
    for dtype in ("float32", "float64"):
        specs = [ParameterSpec(f"p{k}", (size,), dtype) for k, size in enumerate(SIZES)]
        gradients = {
            index: random_bits(index + 100 * comm.rank, (size,), dtype) for index, size in enumerate(SIZES)
        }
        found = []
        for compression in (None, TopK(1.0)):
            options = ReducerOptions(bucket_bytes=LIMIT, prescale=0.3, postscale=1.7, compression=compression)
            source = Source(comm, specs, options)
            source.reduce(gradients)
            found.append([source.read(index).tobytes() for index in gradients])
            assert not any(rest.any() for rest in source.reducer.residuals().values())
            source.reducer.close()
        assert found[0] == found[1]


@on_ranks(2, 3)
@pytest.mark.parametrize("scaling", [Reduction("average"), Reduction("sum", 0.3, 1.7)])
def test_a_ratio_of_one_is_dense_with_kept_gradients(comm: Communicator, scaling: Reduction) -> None:
    """In each round every rank has each gradient anew, keeps that of an earlier round, or has none. The last
    rank runs out of data."""
    specs = [ParameterSpec(f"p{k}", (size,), "float32") for k, size in enumerate(SIZES)]
    found = []
    for compression in (None, TopK(1.0)):
        options = ReducerOptions(
            op=scaling.op,
            bucket_bytes=LIMIT,
            prescale=scaling.prescale,
            postscale=scaling.postscale,
            compression=compression,
        )
        source = Source(comm, specs, options)
        generator = np.random.default_rng(5)
        last: dict[int, Values] = {}
        seen: list[object] = []
        for number in range(9 if comm.rank == comm.size - 1 else 12):
            fates = generator.integers(0, 3, (comm.size, len(SIZES)))[comm.rank]
            new = np.flatnonzero(fates == 0).tolist()
            kept = [index for index in np.flatnonzero(fates == 1).tolist() if index in last]
            drawn = {k: random_bits(90 * number + 9 * k + comm.rank, (SIZES[k],), "float32") for k in new}
            source.begin({k: last[k] for k in kept} | drawn, range(0, len(SIZES), 2))
            for index in new:
                source.reducer.mark_ready(index)
            result = source.reducer.finish()
            there = [k for k in range(len(SIZES)) if result.produced[k] or k in kept]
            last |= {index: source.read(index).copy() for index in there}
            seen.append((result.produced.tolist(), [last[index].tobytes() for index in there]))
        source.begin({})
        source.reducer.join()
        assert not any(rest.any() for rest in source.reducer.residuals().values())
        source.reducer.close()
        found.append(seen)
    assert found[0] == found[1]


@on_ranks(3)
def test_a_gradient_that_a_rank_keeps_is_sent(comm: Communicator) -> None:
    """Nothing is lost, nothing is sent twice: what a round leaves out of a kept gradient is residual, and it
    is sent later. A round in which no rank has a new gradient changes nothing."""
    source = Source(comm, [ParameterSpec("p", (4,), "float32")], ReducerOptions(compression=TopK(0.5)))
    reducer = source.reducer
    source.reduce({0: np.float32([4, 3, 2, 1])})
    for first in (12, 8):
        kept = source.read(0).copy()
        if comm.rank == 0:
            source.reduce({0: np.float32([first, 0, 0, 0])})
        else:
            source.begin({0: kept})
            reducer.finish()
        if first == 12:  # rank 0 has (12, 0, 2, 1), and the others (4, 3, 2, 1)
            np.testing.assert_allclose(source.read(0), np.float32([20, 6, 2, 0]) / 3)
            assert reducer.residuals()["p"].tolist() == ([0, 0, 0, 1] if comm.rank == 0 else [0, 0, 2, 1])
    before = source.read(0).copy(), reducer.residuals()["p"]
    source.begin({0: before[0]})
    assert not reducer.finish().produced.any()
    assert source.read(0).tobytes() == before[0].tobytes()
    assert reducer.residuals()["p"].tobytes() == before[1].tobytes()
    reducer.close()


@on_ranks(3)
def test_ranks_that_run_out_of_data_send_zeros(comm: Communicator) -> None:
    """Rank 1 has data for one step, the others for two."""
    spec = ParameterSpec("p", (6,), "float32")
    source = Source(comm, [spec], ReducerOptions(compression=TopK(0.5)))
    reducer = source.reducer
    # What is kept back of the first step, (0, 0, 0, 3, 2, 1), makes the fourth entry one of the largest then.
    steps = [[6, 5, 4, 0, 0, 0], [6, 5, 0, 6, 0, 0]]
    for wanted in steps[:1] if comm.rank == 1 else steps:
        source.reduce({0: np.float32([6, 5, 4, 3, 2, 1])})
        np.testing.assert_array_equal(source.read(0), np.float32(wanted))
    source.begin({})
    before = reducer.residuals()
    assert before["p"].tolist() == ([0, 0, 0, 3, 2, 1] if comm.rank == 1 else [0, 0, 4, 0, 4, 2])
    reducer.join()
    assert before["p"].tobytes() == reducer.residuals()["p"].tobytes()
    reducer.close()


def test_what_is_not_finite_is_sent_and_not_kept(comm: Communicator) -> None:
    options = ReducerOptions(compression=TopK(0.25))
    source = Source(comm, [ParameterSpec("p", (4,), "float32")], options)
    source.reduce({0: np.float32([np.inf, np.nan, np.inf, 1] if comm.rank == 0 else [1, 2, 3, 4])})
    assert np.isinf(source.read(0)[0])
    kept = source.reducer.residuals()["p"].tolist()
    assert kept == ([0, 0, 0, 1] if comm.rank == 0 else [1, 2, 3, 0])
    source.reducer.close()


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
    options = ReducerOptions(op="sum", compression=TopK(0.1))
    source = Source(comm, specs, options)
    reducer = source.reducer
    assert reducer.plan.buckets[0].slots[1:], "one bucket holds both"
    ones = np.ones(10, np.float32)
    source.reduce({0: 1000 * ones, 1: ones})
    kept = reducer.residuals()["unused"].copy()
    arrived = np.zeros(10, np.float32)
    with np.errstate(all="raise"):
        for _ in range(30):
            assert source.reduce({1: ones}).produced.tolist() == [False, True]
            arrived += source.read(1)
    assert (reducer.residuals()["unused"] == kept).all()
    assert arrived.sum() + comm.size * reducer.residuals()["used"].sum() == comm.size * 10 * 31
    assert (arrived > 0).all()
