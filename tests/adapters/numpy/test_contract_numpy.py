"""The contract of adapters, over the reference adapter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import multiring.numpy
from multiring import Communicator
from multiring.errors import MismatchError, UsageError
from tests.adapters.contract import Adapter, AdapterContract, oracle
from tests.on_ranks import all_raise, on_ranks, refuses
from tests.support import REPOSITORY, run_job

Array = NDArray[Any]


class NumpyAdapter(Adapter):
    """Implements `AdapterUnderTest` with explicit gradient arrays."""

    package = multiring.numpy

    def __init__(
        self, comm: Communicator, weights: Mapping[str, Array], bucket_bytes: int, **options: Any
    ) -> None:
        self._comm = comm
        self._model = {name: value.copy() for name, value in weights.items()}
        self._found: dict[str, Array] = {}
        self._reduction = multiring.numpy.GradientBuckets(
            self._model, comm, bucket_bytes=bucket_bytes, **options
        )

    def backward(self, x: Array, y: Array, *, extra: bool = True, synchronise: bool = True) -> float:
        loss, gradients = oracle(self._model, x, y, extra=extra)
        for name in reversed(list(gradients)):
            (self._reduction.ready if synchronise else self._reduction.add)(name, gradients[name])
        if synchronise:
            self._found = self._reduction.synchronize()
        return loss

    def gradients(self) -> dict[str, Array | None]:
        return {name: self._found[name].copy() if name in self._found else None for name in self._model}

    def zero_grad(self) -> None:
        self._reduction.zero()
        self._found = {}

    def step(self, rate: float) -> None:
        for name, gradient in self._found.items():
            self._model[name] -= rate * gradient

    def weights(self) -> dict[str, Array]:
        return {name: value.copy() for name, value in self._model.items()}

    def join(self) -> AbstractContextManager[None]:
        return self._reduction.join(self._model)


class TestNumpyAdapter(AdapterContract):
    adapter = NumpyAdapter


@on_ranks(3)
def test_sums_of_mixed_dtypes(comm: Communicator) -> None:
    weights = {
        "half": np.zeros(3, np.float16),
        "single": np.zeros((2, 2), np.float32),
        "none": np.zeros((), np.float64),
    }
    buckets = multiring.numpy.GradientBuckets(weights, comm, average=False, postscale=0.5)
    for step in range(2):
        buckets.zero()
        buckets.add("half", np.full(3, comm.rank))
        buckets.ready("half", np.full(3, 1.0))
        if comm.rank == comm.size - 1:
            buckets.ready("single", np.full((2, 2), step))
        found = buckets.synchronize()
        assert set(found) == {"half", "single"}
        assert found["half"].dtype == np.float16
        np.testing.assert_array_equal(found["half"], 0.5 * sum(range(comm.size + 1)))
        np.testing.assert_array_equal(found["single"], 0.5 * step)
        for name in found:
            with pytest.raises(
                UsageError, match=f"'{name}' was reduced before, and would be once more with op='sum'"
            ):
                buckets.add(name, np.ones_like(weights[name]))
    buckets.close()


def test_refused(comm: Communicator) -> None:
    make = multiring.numpy.GradientBuckets
    buckets = make({"a": np.zeros(2), "b": np.zeros(2)}, comm)
    for text, call in {
        "no parameters": lambda: make({}, comm),
        "dtype int64 cannot be reduced": lambda: make({"a": np.zeros(2, np.int64)}, comm),
        "no parameter 'c'": lambda: buckets.add("c", np.zeros(2)),
        "'a' is said to be ready but has no gradient": lambda: buckets.ready("a"),
    }.items():
        with pytest.raises(UsageError, match=text):
            call()
    buckets.ready("a", np.ones(2))
    with pytest.raises(UsageError, match="call synchronize"):
        buckets.ready("a", np.ones(2))
    with pytest.raises(UsageError, match="'a' was said to be ready and may have left"):
        buckets.zero()
    np.testing.assert_array_equal(buckets.synchronize()["a"], 1.0)
    buckets.close()


def test_gradients_of_other_forms_are_refused(comm: Communicator) -> None:
    """NumPy would broadcast them, or drop an imaginary part or a mask."""
    weights = {"w": np.zeros((2, 3), np.float32), "s": np.zeros((), np.float32)}
    buckets = multiring.numpy.GradientBuckets(weights, comm)
    whole = np.ones((2, 3))
    wrong: list[Any] = [np.ones(shape) for shape in ((1,), (3,), (1, 3), (2, 1), (), (3, 2), (1, 2, 3), (6,))]
    wrong += [1.0, [1.0, 2.0, 3.0], whole + 1j, whole.astype(object), whole.astype(str)]
    text = r"of 'w' is \S+ \(.*, but the parameter is float32 \(2, 3\)"
    for give in (buckets.add, buckets.ready):
        for gradient in wrong:
            refuses(UsageError, text, give, "w", gradient)
        refuses(UsageError, r"'s' is float64 \(1,\), but .* float32 \(\)", give, "s", np.ones(1))
        refuses(UsageError, "the gradient of 'w' is masked", give, "w", np.ma.MaskedArray(whole, mask=True))
    taken: Any = whole.tolist()  # what has the shape and holds real numbers
    buckets.add("w", taken)
    buckets.add("w", whole.astype(np.int8))
    buckets.ready("w", np.asfortranarray(whole))
    buckets.ready("s", np.array(2))
    found = buckets.synchronize()
    np.testing.assert_array_equal(found["w"], 3 * whole)
    assert found["s"] == 2
    buckets.close()


@all_raise(MismatchError, "at this call of check_state.*'b'")
def test_drift_after_the_last_step(comm: Communicator) -> None:
    weights = {"a": np.zeros(2), "b": np.zeros(2)}
    buckets = multiring.numpy.GradientBuckets(weights, comm)
    buckets.ready("a", np.ones(2))
    buckets.synchronize()
    buckets.check_state()
    weights["b"] += comm.rank
    buckets.check_state()


def test_state_of_all_kinds(comm: Communicator) -> None:
    def make(rank: int) -> dict[str, Array]:
        draw = np.random.default_rng(rank)
        big = draw.integers(0, 255, (4, 6)).astype(np.uint8)
        return {
            "bool": big > 100,
            "number": np.array(draw.random()),
            "gaps": big[:, ::2],
            "names": big.astype("S3"),
        }

    state, wanted = make(comm.rank), make(1)
    multiring.numpy.broadcast_parameters(state, 1, comm)
    for name, value in state.items():
        np.testing.assert_array_equal(value, wanted[name])
    assert multiring.numpy.broadcast_object(comm.rank, 1) == 1
    buffers = {"mean": np.full(2, float(comm.rank))}
    multiring.numpy.sync_buffers(buffers, comm=comm)
    np.testing.assert_array_equal(buffers["mean"], 0)


RESULTS = """
for rank in range(comm.size):
    np.testing.assert_array_equal(rows[rows[:, 0] == rank], np.full((rank + 1, 2), rank))
np.testing.assert_array_equal(mine, np.array_split(np.arange(10), comm.size)[comm.rank])
np.testing.assert_array_equal(block, mine * comm.size)
assert total[0] == comm.size and largest >= loss and first[2] == 2
np.testing.assert_array_equal(received, np.full(comm.size, comm.rank))
assert names == [f"rank {rank}" for rank in range(comm.size)]
assert [part[0] for part in parts] == [k * comm.size for k in range(4)]
assert [one[0] for one in sums] == [comm.size] * 2
assert members == list(range(comm.rank % 2, comm.size, 2))
assert bucket[0] == sum(range(comm.size))
assert state["epoch"] == 3 and set(metrics) == {"loss"}
print("weights", np.concatenate([one.ravel() for one in weights.values()]).tobytes().hex()[:64])
"""


def test_the_script_of_the_pages_runs(tmp_path: Path) -> None:
    pages = [(REPOSITORY / "docs" / page).read_text() for page in ("numpy.md", "reference/numpy.md")]
    blocks = re.findall(r"^```python\n(.*?)^```$", "\n".join(pages), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    script = tmp_path / "script.py"
    script.write_text("\n".join([*blocks, RESULTS]))
    found = re.findall(r"weights (\w+)", run_job(3, script, code=0).stdout)
    assert len(found) == 3
    assert len(set(found)) == 1
