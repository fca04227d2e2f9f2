"""Ranks whose training state has drifted apart are told so, and by whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import multiring
from multiring import Communicator
from multiring.errors import MismatchError, UsageError
from multiring.metrics import batch_weight
from multiring.state.advice import advice_for
from multiring.state.buffer_sync import sync_arrays
from multiring.state.check import StateCheck, _describe
from tests.on_ranks import on_ranks

STATE = {"weight": np.arange(6, dtype=np.float32).reshape(2, 3), "lr": 0.1, "steps": 3, "nesterov": False}


OTHER = np.float32([[0, 1, 2], [3, 4, 5.0000005]])
# What rank 1 has instead, and what all are told.
DIFFERENCES: list[tuple[str, Any, str]] = [
    ("weight", OTHER, r"at step 1: .*'weight' float32 \(2, 3\) .*on ranks 0, 2, but .*on rank 1"),
    ("weight", np.float32([[1, 0, 2], [3, 4, 5]]), "'weight'"),
    ("weight", np.arange(6, dtype=np.float32), r"\(6,\).* on rank 1"),
    ("lr", 0.01, r"'lr' 0.1 on ranks 0, 2, but .*'lr' 0.01 on rank 1"),
    ("nesterov", True, "'nesterov' False on ranks 0, 2, but .* True on rank 1"),
]


@on_ranks(3)
def test_the_first_difference_is_named(comm: Communicator) -> None:
    for name, value, expected in DIFFERENCES:
        check = StateCheck(comm, 1)
        check.due()
        check.compare(STATE.items())
        own = STATE | ({name: value} if comm.rank == 1 else {})
        with pytest.raises(MismatchError, match=expected) as caught:
            check.compare(own.items())
        assert caught.value.tensor == name


def test_a_forgotten_broadcast_is_told(comm: Communicator) -> None:
    check = StateCheck(comm, 3)
    for step in range(1, 7):
        if not check.due():
            continue
        with pytest.raises(MismatchError) as caught:
            check.compare([("weight", np.full(2, comm.rank))])
        said = "Most likely broadcast_parameters was not called before the first step"
        assert (said in str(caught.value)) == (step == 2), (step, caught.value)


def test_the_first_comparison_names_the_broadcast_where_few_arrays_differ() -> None:
    few = advice_for(2, ["weight"], 5, "callbacks.BroadcastInitialState()")
    assert few.startswith("most likely callbacks.BroadcastInitialState() was not called")
    assert "DistributedOptimizer" not in few
    assert "the optimizers differ (learning rate" in advice_for(2, ["weight"], 1, has_numbers=False)
    assert "1 of 5 arrays differ" in advice_for(4, ["weight"], 5)


@on_ranks(3)
def test_what_is_equal_passes(comm: Communicator) -> None:
    check = StateCheck(comm, 1)
    own: dict[str, Any] = dict(STATE)
    if comm.rank == 0:  # the same numbers, of other types; another layout
        own |= {"lr": np.float64(0.1), "steps": np.int32(3), "weight": np.asfortranarray(STATE["weight"])}
    # An object's repr has an address.
    check.compare([*own.items(), ("hook", lambda: None), ("empty", np.empty((0, 3)))])
    joined = comm.rank == 2
    check.compare({"other": 1}.items() if joined else own.items(), active=not joined)


@on_ranks(1, 2)
def test_steps_that_compare(comm: Communicator) -> None:
    for every, expected in ((0, []), (1, [*range(2, 13)]), (5, [2, 4, 5, 10]), (100, [2, 4, 8, 10])):
        check = StateCheck(comm, every)
        assert [step for step in range(1, 13) if check.due()] == (expected if comm.size > 1 else [])


def test_numbers_are_compared_in_every_tenth_step(comm: Communicator) -> None:
    check = StateCheck(comm, 100)
    for _ in range(10):
        check.due()
    weight = np.full(2, comm.rank)
    check.compare([("rate", 0.1), ("weight", weight)])
    with pytest.raises(MismatchError, match="step 10.*'rate' 0.0 on rank 0, but 'rate' 1.0 on rank 1"):
        check.compare([("weight", weight), ("rate", float(comm.rank))])
    for _ in range(6):
        check.due()
    with pytest.raises(MismatchError, match="step 16.*'weight'"):
        check.compare([("weight", weight), ("rate", float(comm.rank))])


def test_intervals_have_to_agree(comm: Communicator) -> None:
    with pytest.raises(MismatchError, match="'check_every' 10 on rank 0, but .*'check_every' 11 on rank 1"):
        StateCheck(comm, 10 + comm.rank)
    with pytest.raises(UsageError, match="check_every is -1"):
        StateCheck(comm, -1)


@on_ranks(1, 4)
@pytest.mark.parametrize("mode", ["broadcast", "average", "local"])
def test_buffers(comm: Communicator, mode: Any) -> None:
    rank = comm.rank
    counted = [1, 3] if comm.size == 4 else [0]
    plain = np.arange(8, dtype=np.float32)
    arrays = {
        "mean": plain[::2] + rank,
        "strided": (np.zeros((3, 4)) + rank).T,
        "complex": np.array([1j * rank, rank]),
        "count": np.array(rank + 5),
        "nothing": np.empty((0, 2)),
        "half": np.full(3, rank, np.float16),
    }
    sync_arrays(comm, arrays, mode, [r in counted for r in range(comm.size)])
    value = {"local": rank, "broadcast": counted[0], "average": float(np.mean(counted))}[mode]
    np.testing.assert_array_equal(arrays["mean"], plain[::2] + np.float32(value))
    np.testing.assert_array_equal(arrays["strided"], np.full((4, 3), value))
    np.testing.assert_array_equal(arrays["complex"], [1j * value, value])
    np.testing.assert_array_equal(arrays["half"], np.full(3, value, np.float16))
    assert arrays["count"] == (rank if mode == "local" else counted[0]) + 5


def test_buffers_that_differ(comm: Communicator) -> None:
    with pytest.raises(UsageError, match="buffers is 'mean'; accepted: broadcast, average, local"):
        sync_arrays(comm, {}, "mean")  # type: ignore[arg-type]
    with pytest.raises(MismatchError, match="buffers: a"):
        sync_arrays(comm, {"a": np.zeros(2 + comm.rank)})


@pytest.mark.parametrize(("comm", "counts"), [(3, [0, 5, 1]), (2, [0, 0])], indirect=["comm"])
def test_weighted_losses_average_to_the_mean_over_samples(comm: Communicator, counts: list[int]) -> None:
    count = counts[comm.rank]
    own = np.arange(count).mean() * batch_weight(count, comm) if count else batch_weight(0, comm)
    samples = [sample for each in counts for sample in range(each)]
    assert comm.allreduce(np.array(own), op="average") == pytest.approx(np.mean(samples) if samples else 0.0)
    for wrong in (-1, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="count is"):
            batch_weight(wrong, comm)


@pytest.mark.parametrize("comm", [1, 3], indirect=True)
def test_losses_of_several_batches_average_to_the_mean_over_samples(comm: Communicator) -> None:
    counts = [[3, 0, 4], [], [1]][: comm.size]
    mine = [np.arange(10.0 * comm.rank, 10.0 * comm.rank + count) for count in counts[comm.rank]]
    weights = multiring.batch_weights(counts[comm.rank], comm)
    own = sum(part.mean() * weight for part, weight in zip(mine, weights, strict=True) if part.size)
    samples = [10.0 * rank + k for rank, parts in enumerate(counts) for count in parts for k in range(count)]
    assert comm.allreduce(np.array(float(own)), op="average") == pytest.approx(np.mean(samples))
    assert multiring.batch_weights([0.0], comm) == [0.0]
    with pytest.raises(UsageError, match="count is -1"):
        multiring.batch_weights([2, -1], comm)


@pytest.mark.parametrize("comm", [1, 3], indirect=True)
def test_ranks_stop_together(comm: Communicator) -> None:
    for step in range(5):
        if multiring.stop_together(step == 2 + (comm.rank + 1) % comm.size, comm):
            break
    assert step == 2


def test_the_order_of_a_set_does_not_count() -> None:
    one, other = {0, 8}, {8, 0}  # in one slot of the table: in the order in which they came
    assert repr(one) != repr(other)
    assert _describe(one) == _describe(other)
    assert _describe(frozenset(one)) == _describe(frozenset(other))
    assert _describe({0, 9}) != _describe(one)
