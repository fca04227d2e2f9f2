"""Planning of buckets: pure functions, tested over generated models."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from multiring.errors import UsageError
from multiring.gradients.bucketing import (
    ALIGNMENT,
    ParameterSpec,
    Plan,
    capacity,
    flag_bits,
    itemsize,
    plan_buckets,
)

Model = tuple[list[ParameterSpec], list[int]]  # and an order of arrival
DTYPES = ("float16", "bfloat16", "float32", "float64")


@st.composite
def models(draw: st.DrawFn) -> Model:
    kinds = st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 20), max_size=3), st.booleans())
    drawn = draw(st.lists(kinds, min_size=1, max_size=30))
    specs = [
        ParameterSpec(f"p{k}", tuple(shape), dtype, sparse=sparse and bool(shape))
        for k, (dtype, shape, sparse) in enumerate(drawn)
    ]
    return specs, draw(st.permutations(range(len(specs))))


def make(model: Model, size: int, limit: int, first: int) -> Plan:
    return plan_buckets(model[0], model[1], size=size, bucket_bytes=limit, first_bucket_bytes=first)


@given(models(), st.integers(1, 300), st.integers(1, 4000), st.integers(1, 4000))
def test_every_gradient_has_one_slot_of_its_own(model: Model, size: int, limit: int, first: int) -> None:
    specs, _ = model
    plan = make(model, size, limit, first)
    slots = [slot for bucket in plan.buckets for slot in bucket.slots]
    assert sorted(slot.index for slot in slots) == list(range(len(specs)))
    assert plan.nbytes <= capacity(specs, size)
    used = np.zeros(plan.nbytes, dtype=np.int64)
    for bucket in plan.buckets:
        assert bucket.offset % ALIGNMENT == 0
        for slot in bucket.slots:
            assert slot.nbytes == specs[slot.index].nbytes
            assert slot.offset % ALIGNMENT == 0
            assert bucket.offset <= slot.offset
            assert slot.offset + slot.nbytes <= bucket.flags_offset
            assert specs[slot.index].sparse or specs[slot.index].dtype == bucket.dtype
            used[slot.offset : slot.offset + slot.nbytes] += 1
        flags = bucket.offset + bucket.nbytes - bucket.flags_offset
        assert flags == (len(bucket.slots) + size) * itemsize(bucket.dtype)
        used[bucket.flags_offset : bucket.flags_offset + flags] += 1
    assert used.max() <= 1


@given(models(), st.integers(1, 4000), st.integers(1, 4000))
def test_buckets_keep_their_limits_and_the_order_of_arrival(model: Model, limit: int, first: int) -> None:
    specs, order = model
    plan = make(model, 2, limit, first)
    place = {index: position for position, index in enumerate(order)}
    seen: dict[str, int] = {}
    last = -1
    for bucket in plan.buckets:
        dense = [slot.index for slot in bucket.slots if not specs[slot.index].sparse]
        positions = [place[index] for index in dense]
        assert positions == sorted(positions)
        if dense:
            # Buckets of one dtype are filled one after the other; all leave as their last one is due.
            assert positions[0] > seen.get(bucket.dtype, -1)
            assert positions[-1] > last
            last = positions[-1]
            bound = limit if bucket.dtype in seen else first
            assert len(dense) == 1 or sum(specs[index].nbytes for index in dense) <= bound
            seen[bucket.dtype] = positions[-1]
    sparse = {index for index in order if specs[index].sparse}
    assert sparse == {slot.index for slot in plan.buckets[-1].slots if specs[slot.index].sparse}


@given(models(), st.integers(1, 4000))
def test_neighbours_share_a_bucket_when_they_fit(model: Model, limit: int) -> None:
    specs, _ = model
    sizes: dict[str, list[tuple[int, int]]] = {}
    for bucket in make(model, 1, limit, limit).buckets:
        dense = [specs[slot.index].nbytes for slot in bucket.slots if not specs[slot.index].sparse]
        if dense:
            sizes.setdefault(bucket.dtype, []).append((sum(dense), dense[0]))
    for buckets in sizes.values():
        for (total, _), (_, following) in itertools.pairwise(buckets):
            assert total + following > limit


@given(
    st.sampled_from(DTYPES),
    st.floats(-24, 24).map(lambda exponent: 2.0**exponent),
    st.sampled_from([1, -1]),
    st.integers(1, 100_000),
)
def test_flags_survive_every_allowed_scale(dtype: str, magnitude: float, sign: int, size: int) -> None:
    """One raised flag among zeros, scaled, averaged and rounded, is not zero and not infinite."""
    scale = magnitude * sign
    assume(dtype != "float16" or 2.0**-15 < magnitude / size < 2.0**24)  # what its exponents allow
    pattern = flag_bits(dtype, scale, size)
    if dtype == "bfloat16":
        raised = np.array([pattern << 16], dtype=np.uint32).view(np.float32)[0]
        result = np.float32(raised * scale / size)
    else:
        raised = np.array([pattern], dtype=f"u{itemsize(dtype)}").view(dtype)[0]
        result = np.dtype(dtype).type(float(raised) * scale / size)
    assert raised > 0
    assert np.isfinite(result)
    assert result != 0


def test_what_cannot_be_is_refused() -> None:
    for scale in (0.0, float("nan"), float("inf"), 1e-40, 1e300):
        with pytest.raises(UsageError, match="prescale"):
            flag_bits("float16", scale, 2)
    with pytest.raises(UsageError, match="int32 cannot be reduced; use one of float16"):
        itemsize("int32")
