"""What the native module offers besides communicators."""

from __future__ import annotations

import subprocess
import sys
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from multiring import UsageError, _core
from multiring.arrays import checksum
from tests.support import REPOSITORY

SHARED = np.zeros(4)


def test_reduction_without_ranks() -> None:
    inputs = [np.arange(1000, dtype=np.float32) + k for k in range(3)]
    outputs = [np.zeros(1000, np.float32) for _ in range(2)]
    call = _core.ArrayReduction(inputs, outputs, _core.ReduceOp.MAX)
    for _ in range(2):
        call()
        for output in outputs:
            np.testing.assert_array_equal(output, inputs[2])
        inputs[2] += 1


def test_reductions_that_cannot_be() -> None:
    for inputs, outputs, text in (
        ([], [np.zeros(3)], "at least one"),
        ([np.zeros(3)], [], "at least one"),
        ([np.zeros(3)], [np.zeros(4)], "differ"),
        ([np.zeros(3), np.zeros(3, np.float32)], [np.zeros(3)], "differ"),
        ([np.zeros(6)[::2]], [np.zeros(3)], "contiguous"),
        ([SHARED[:3]], [SHARED[1:4]], "overlaps"),
        ([np.zeros(3)], [SHARED[:3], SHARED[1:4]], "overlaps"),
    ):
        with pytest.raises(UsageError, match=text):
            _core.ArrayReduction(inputs, outputs, _core.ReduceOp.SUM)


def test_its_stub_is_up_to_date() -> None:
    """Otherwise run `python ci/update_stubs.py` and look at the difference."""
    subprocess.run([sys.executable, str(REPOSITORY / "ci" / "update_stubs.py"), "--check"], check=True)


@given(
    arrays(st.sampled_from([np.float16, np.float32, np.float64]), st.integers(2, 70), unique=True),
    st.randoms(use_true_random=False),
)
def test_a_checksum_changes_with_structure(x: np.ndarray[Any, Any], draw: Random) -> None:
    first, second = draw.sample(range(x.size), 2)
    swapped, permuted = x.copy(), x.copy()
    swapped[[first, second]] = swapped[[second, first]]
    draw.shuffle(permuted)
    with np.errstate(all="ignore"):
        for other in (swapped, permuted, x[::-1].copy(), -x, 2 * x, x / 2):
            assert (checksum(other) == checksum(x)) == (other.tobytes() == x.tobytes())


def test_a_checksum_changes_with_every_bit_and_place() -> None:
    draw = np.random.default_rng(0)
    for size in (0, 1, 7, 8, 31, 32, 33, 1000):
        data = draw.integers(0, 256, size, np.uint8)
        seen = {checksum(data), checksum(data, 1), checksum(np.append(data, np.uint8(0)))}
        for bit in range(8 * size):
            changed = data.copy()
            changed[bit // 8] ^= 1 << bit % 8
            seen.add(checksum(changed))
        assert len(seen) == 3 + 8 * size
    grid = np.arange(12.0).reshape(3, 4)
    assert checksum(grid[:, ::2]) == checksum(np.ascontiguousarray(grid[:, ::2]))
    assert checksum(grid, 2**64 - 1) != checksum(grid)
