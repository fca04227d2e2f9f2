"""Which rank sees which sample, and in what order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiring.errors import UsageError
from multiring.models.data import Synthetic
from multiring.models.data.loader import evaluation_batches, training_batches
from multiring.models.data.sharding import (
    epoch_order,
    global_batch_indices,
    local_slice,
    sample_generator,
    steps_per_epoch,
)

counts = st.integers(1, 500)
sizes = st.integers(1, 9)
batches = st.integers(1, 40)
seeds = st.integers(0, 2**64 - 1)


@given(counts, seeds, st.integers(0, 1000))
def test_an_epoch_visits_every_sample_once(count: int, seed: int, epoch: int) -> None:
    order = epoch_order(count, seed, epoch)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(count))
    assert np.array_equal(order, epoch_order(count, seed, epoch))


def test_orders_differ_between_epochs_and_seeds() -> None:
    orders = [tuple(epoch_order(100, seed, epoch)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == len(orders)


@given(counts, sizes)
def test_slices_partition_without_a_gap(count: int, size: int) -> None:
    parts = [local_slice(count, rank, size) for rank in range(size)]
    expected = np.array_split(np.arange(count), size)
    for part, other in zip(parts, expected, strict=True):
        assert np.array_equal(np.arange(count)[part], other)


@given(counts, sizes, batches, st.integers(0, 5))
def test_loaders_of_all_ranks_cover_the_epoch_in_order(count: int, size: int, batch: int, first: int) -> None:
    data = Synthetic(1, 1000, train_count=count, test_count=count, channels=1, pool=500)
    total = size * batch
    epoch = {"seed": 1, "epoch": 2, "global_batch": total, "first_step": first}
    ranks = [list(training_batches(data, rank=rank, size=size, **epoch)) for rank in range(size)]
    steps = max(0, steps_per_epoch(count, total) - first)
    assert [len(rank) for rank in ranks] == [steps] * size
    seen: list[float] = []
    for step in range(steps):
        parts = [rank[step] for rank in ranks]
        assert {part.global_count for part in parts} == {sum(len(part.labels) for part in parts)}
        seen += [value for part in parts for value in part.images.ravel().tolist()]
    expected, _ = data.load("train", epoch_order(count, 1, 2)[first * total :], seed=1, epoch=2)
    assert seen == expected.ravel().tolist()


@given(counts, sizes, batches)
def test_evaluation_counts_every_test_image_once(count: int, size: int, batch: int) -> None:
    data = Synthetic(1, 10, test_count=count, channels=1, pool=500)
    seen = [
        value
        for rank in range(size)
        for part in evaluation_batches(data, batch=batch, rank=rank, size=size)
        for value in part.images.ravel().tolist()
    ]
    expected, _ = data.load("test", np.arange(count), seed=0, epoch=0)
    assert seen == expected.ravel().tolist()


def test_a_samples_random_numbers_depend_on_seed_epoch_and_number_only() -> None:
    def draw(*key: int) -> tuple[float, ...]:
        return tuple(sample_generator(*key).random(3))

    assert draw(1, 2, 3) == draw(1, 2, 3)
    assert len({draw(1, 2, 3), draw(0, 2, 3), draw(1, 0, 3), draw(1, 2, 0)}) == 4


def test_wrong_arguments_are_refused() -> None:
    for call, arguments, told in (
        (steps_per_epoch, (0, 4), "needs samples"),
        (steps_per_epoch, (4, 0), "needs samples"),
        (local_slice, (4, 2, 2), "rank 2 is not one of 2"),
        (global_batch_indices, (np.arange(4), 2, 2), "step 2 is outside"),
    ):
        with pytest.raises(UsageError, match=told):
            call(*arguments)
