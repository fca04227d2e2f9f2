"""What every adapter has to do, whatever the framework: the same tests, with NumPy as the oracle.

A test module of an adapter implements `AdapterUnderTest` for a tiny model and derives from `AdapterContract`:

    class TorchAdapter: ...

    class TestTorchAdapter(AdapterContract):
        adapter = TorchAdapter

The model, in float64, where `extra` is a head that a batch may leave out:

    hidden = tanh(x @ first + offset)
    output = hidden @ second  [+ hidden @ extra]
    loss   = sum((output - y) ** 2) / (2 * len(x))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

import multiring
from multiring import Communicator
from multiring.errors import AbortedError, MismatchError, PeerLostError
from tests.rank_pool import RankPool

__all__ = ["INPUTS", "OUTPUTS", "AdapterContract", "AdapterUnderTest", "oracle", "starting_weights"]

Array = NDArray[np.float64]
Weights = dict[str, Array]
Pool = Callable[[int], RankPool]

INPUTS, HIDDEN, OUTPUTS = 5, 7, 3
RATE = 0.1
TIGHT = {"rtol": 1e-12, "atol": 1e-14}


class AdapterUnderTest(Protocol):
    """A model of one framework whose gradients are averaged over ranks."""

    def __init__(self, comm: Communicator, weights: Mapping[str, Array], bucket_bytes: int) -> None:
        """Build the model and register it; buckets hold `bucket_bytes`, the first one too. Collective."""

    def backward(self, x: Array, y: Array, *, extra: bool = True, synchronise: bool = True) -> float:
        """Forward and backward; gradients are added to those that there are. Returns the loss.

        With `synchronise` gradients are averaged over ranks when this (or `gradients`) returns; without, they
        stay local until the next call with it.
        """

    def gradients(self) -> dict[str, Array | None]:
        """The gradients, None where there is none."""

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def step(self, rate: float) -> None:
        """weights -= rate * gradients, where there is one."""

    def weights(self) -> Weights:
        """Copies of the weights."""

    def broadcast(self, root: int) -> None:
        """Take over the weights of `root`. Collective."""

    def average_metrics(self, metrics: Mapping[str, float], count: float) -> dict[str, float]:
        """Average over ranks, weighted by count. Collective."""

    def join(self) -> AbstractContextManager[None]:
        """Context of a loop with uneven data."""

    def close(self) -> None:
        """Release everything."""


Make = Callable[[Communicator, Mapping[str, Array], int], AdapterUnderTest]


def starting_weights(seed: int = 0) -> Weights:
    """The model's weights, the same on every rank."""
    draw = np.random.default_rng(seed)
    shapes = {
        "first": (INPUTS, HIDDEN),
        "offset": (HIDDEN,),
        "second": (HIDDEN, OUTPUTS),
        "extra": (HIDDEN, OUTPUTS),
    }
    return {name: draw.standard_normal(shape) for name, shape in shapes.items()}


def oracle(weights: Weights, x: Array, y: Array, *, extra: bool = True) -> tuple[float, Weights]:
    """Loss and gradients of the model."""
    hidden = np.tanh(x @ weights["first"] + weights["offset"])
    head = weights["second"] + (weights["extra"] if extra else 0.0)
    error = (hidden @ head - y) / len(x)
    behind = (error @ head.T) * (1 - hidden**2)
    gradients = {"first": x.T @ behind, "offset": behind.sum(0), "second": hidden.T @ error}
    if extra:
        gradients["extra"] = hidden.T @ error
    return float((error**2).sum() * len(x) / 2), gradients


def batch(seed: int, samples: int) -> tuple[Array, Array]:
    """A batch that any rank can compute."""
    draw = np.random.default_rng([17, seed])
    return draw.standard_normal((samples, INPUTS)), draw.standard_normal((samples, OUTPUTS))


def mean(gradients: Sequence[Weights], size: int) -> Weights:
    """Sum over those ranks that have a gradient, divided by `size`."""
    names = {name for one in gradients for name in one}
    return {name: sum(one[name] for one in gradients if name in one) / size for name in names}


def compare(actual: Mapping[str, Array | None], expected: Mapping[str, Array]) -> None:
    assert {name for name, value in actual.items() if value is not None} == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, **TIGHT, err_msg=name)


def bits(arrays: Mapping[str, Array | None]) -> dict[str, bytes | None]:
    return {name: None if value is None else np.asarray(value).tobytes() for name, value in arrays.items()}


class AdapterContract:
    """The suite. Small buckets make several of them."""

    adapter: ClassVar[Make]

    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    @pytest.mark.parametrize("bucket_bytes", [64, 400, 1 << 20])
    def test_gradients_are_averaged(self, ranks: Pool, size: int, bucket_bytes: int) -> None:
        results = ranks(size).run(average_gradients, self.adapter, bucket_bytes)
        assert all(result == results[0] for result in results), "ranks have different bits"

    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    def test_ranks_train_like_one(self, ranks: Pool, size: int) -> None:
        results = ranks(size).run(train_like_one, self.adapter)
        assert all(result == results[0] for result in results), "ranks have different bits"

    def test_two_runs_give_the_same_bits(self, ranks: Pool) -> None:
        assert ranks(3).run(train_like_one, self.adapter) == ranks(3).run(train_like_one, self.adapter)

    @pytest.mark.parametrize("size", [2, 3])
    def test_a_parameter_is_unused_on_some_ranks(self, ranks: Pool, size: int) -> None:
        ranks(size).run(unused_on_some, self.adapter)

    @pytest.mark.parametrize("size", [1, 3])
    def test_a_parameter_is_unused_on_all_ranks(self, ranks: Pool, size: int) -> None:
        ranks(size).run(unused_on_all, self.adapter)

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_local_gradients_are_accumulated(self, ranks: Pool, size: int) -> None:
        ranks(size).run(accumulate_locally, self.adapter)

    @pytest.mark.parametrize("size", [1, 3])
    def test_averaged_gradients_are_accumulated(self, ranks: Pool, size: int) -> None:
        ranks(size).run(accumulate_averages, self.adapter)

    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_state_is_broadcast(self, ranks: Pool, size: int) -> None:
        ranks(size).run(broadcast_state, self.adapter)

    @pytest.mark.parametrize("size", [1, 3])
    def test_metrics_are_weighted(self, ranks: Pool, size: int) -> None:
        ranks(size).run(average_metrics, self.adapter)

    @pytest.mark.parametrize("size", [1, 2, 4])
    @pytest.mark.parametrize("fewest", [0, 2])
    def test_uneven_data(self, ranks: Pool, size: int, fewest: int) -> None:
        ranks(size).run(join_with_uneven_data, self.adapter, fewest)

    @pytest.mark.parametrize("odd", ["shape", "name", "missing"])
    def test_different_models_are_refused(self, ranks: Pool, odd: str) -> None:
        errors = ranks(3).run_expecting_errors(build_different_models, self.adapter, odd)
        for error in errors:
            assert isinstance(error, MismatchError), error
            assert "on rank 1" in str(error)
            assert "on ranks 0, 2" in str(error)
            assert error.tensor == "second"

    def test_the_communicator_survives_a_refused_model(self, ranks: Pool) -> None:
        assert ranks(2).run(recover_from_different_models, self.adapter) == [2, 2]

    def test_a_rank_that_leaves_is_reported(self, ranks: Pool) -> None:
        errors = ranks(3).run_expecting_errors(lose_a_peer, self.adapter, timeout=20.0)
        assert errors[1] is None
        for error in (errors[0], errors[2]):
            assert isinstance(error, PeerLostError | AbortedError), error
            assert "rank 1" in str(error)

    def test_closing_twice_and_building_again(self, ranks: Pool) -> None:
        ranks(2).run(close_and_rebuild, self.adapter)


def average_gradients(comm: Communicator, make: Make, bucket_bytes: int) -> list[Any]:
    """Ranks have batches of different size; the weights of all batches are those of the start."""
    weights = starting_weights()
    model = make(comm, weights, bucket_bytes)
    found = []
    for step in range(3):
        batches = [batch(10 * step + rank, rank + 1) for rank in range(comm.size)]
        model.zero_grad()
        model.backward(*batches[comm.rank])
        expected = mean([oracle(weights, x, y)[1] for x, y in batches], comm.size)
        compare(model.gradients(), expected)
        found.append(bits(model.gradients()))
    model.close()
    return found


def train_like_one(comm: Communicator, make: Make) -> list[Any]:
    """The oracle alone with the batches of all ranks has the same losses."""
    weights = starting_weights()
    model = make(comm, starting_weights(), 200)
    history: list[Any] = []
    for step in range(30):
        x, y = batch(step, 4 * comm.size)
        loss, gradients = oracle(weights, x, y)
        weights = {name: value - RATE * gradients[name] for name, value in weights.items()}
        part = slice(4 * comm.rank, 4 * comm.rank + 4)
        model.zero_grad()
        mine = model.backward(x[part], y[part])
        model.step(RATE)
        total = model.average_metrics({"loss": mine}, 4)["loss"]
        assert abs(total - loss) <= 1e-10 * loss
        history.append((total, bits(model.weights())))
    compare(model.weights(), weights)
    model.close()
    return history


def unused_on_some(comm: Communicator, make: Make) -> None:
    """Ranks without a gradient count as zeros, also for a gradient that only they lack in a later step."""
    weights = starting_weights()
    model = make(comm, weights, 64)
    for step in range(3):
        uses = [(rank + step) % comm.size == 0 for rank in range(comm.size)]
        batches = [batch(10 * step + rank, 3) for rank in range(comm.size)]
        model.zero_grad()
        model.backward(*batches[comm.rank], extra=uses[comm.rank])
        gradients = [oracle(weights, *batches[r], extra=uses[r])[1] for r in range(comm.size)]
        compare(model.gradients(), mean(gradients, comm.size))
    model.close()


def unused_on_all(comm: Communicator, make: Make) -> None:
    """No gradient appears where no rank has one; one that is there stays bit for bit."""
    model = make(comm, starting_weights(), 400)
    x, y = batch(comm.rank, 3)
    model.backward(x, y, extra=False)
    assert model.gradients()["extra"] is None
    model.backward(x, y)
    before = bits(model.gradients())["extra"]
    assert before is not None
    model.backward(x, y, extra=False)
    assert bits(model.gradients())["extra"] == before
    model.zero_grad()
    model.backward(x, y, extra=False)
    assert model.gradients()["extra"] is None
    model.close()


def accumulate_locally(comm: Communicator, make: Make) -> None:
    """Several backward passes, one reduction; a parameter may occur in an early pass only."""
    weights = starting_weights()
    model = make(comm, weights, 64)
    for step in range(2):
        model.zero_grad()
        batches = [[batch(100 * step + 10 * rank + k, k + 1) for k in range(3)] for rank in range(comm.size)]
        for k, (x, y) in enumerate(batches[comm.rank]):
            model.backward(x, y, extra=k == 0, synchronise=k == 2)
        sums = []
        for mine in batches:
            parts = [oracle(weights, x, y, extra=k == 0)[1] for k, (x, y) in enumerate(mine)]
            sums.append({name: sum(part.get(name, 0.0) for part in parts) for name in parts[0]})
        compare(model.gradients(), mean(sums, comm.size))
    model.close()


def accumulate_averages(comm: Communicator, make: Make) -> None:
    """Two synchronised passes without zeroing add up to the sum of both averages."""
    weights = starting_weights()
    model = make(comm, weights, 64)
    batches = [[batch(10 * rank + k, 3) for rank in range(comm.size)] for k in range(2)]
    uses = [[True] * comm.size, [rank == 0 for rank in range(comm.size)]]
    parts = []
    for k in range(2):
        x, y = batches[k][comm.rank]
        model.backward(x, y, extra=uses[k][comm.rank])
        gradients = [oracle(weights, *batches[k][r], extra=uses[k][r])[1] for r in range(comm.size)]
        parts.append(mean(gradients, comm.size))
    compare(model.gradients(), {name: parts[0][name] + parts[1][name] for name in parts[0]})
    model.close()


def broadcast_state(comm: Communicator, make: Make) -> None:
    root = comm.size - 1
    model = make(comm, starting_weights(seed=comm.rank), 64)
    model.broadcast(root)
    assert bits(model.weights()) == bits(starting_weights(seed=root))
    model.close()


def average_metrics(comm: Communicator, make: Make) -> None:
    """Rank 0 saw nothing; its value, even if it is no number, does not matter."""
    model = make(comm, starting_weights(), 64)
    rank = comm.rank
    if comm.size > 1:
        values = {"loss": 1.0 / rank if rank else float("nan"), "accuracy": float(rank)}
        averages = model.average_metrics(values, rank)
        total = sum(range(comm.size))
        assert averages["loss"] == pytest.approx((comm.size - 1) / total, rel=1e-14)
        assert averages["accuracy"] == pytest.approx(sum(r * r for r in range(comm.size)) / total, rel=1e-14)
        assert list(averages) == ["loss", "accuracy"]
    assert np.isnan(model.average_metrics({"loss": 1.0}, 0)["loss"])
    assert model.average_metrics({"loss": 0.25}, 3) == {"loss": 0.25}
    model.close()


def join_with_uneven_data(comm: Communicator, make: Make, fewest: int) -> None:
    """Rank r has `fewest` + r batches; averages divide by the ranks that still have one."""
    expected = starting_weights()
    model = make(comm, starting_weights(), 100)
    for epoch in range(2):
        for step in range(fewest + comm.size - 1):
            active = [rank for rank in range(comm.size) if step < fewest + rank]
            gradients = [oracle(expected, *batch(100 * epoch + 10 * step + rank, 3))[1] for rank in active]
            average = mean(gradients, len(active))
            expected = {name: value - RATE * average[name] for name, value in expected.items()}
        with model.join():
            for step in range(fewest + comm.rank):
                model.zero_grad()
                model.backward(*batch(100 * epoch + 10 * step + comm.rank, 3))
                model.step(RATE)
        compare(model.weights(), expected)
        hashes = comm.allgather_object(bits(model.weights()))
        assert all(found == hashes[0] for found in hashes)
    model.close()


def build_different_models(comm: Communicator, make: Make, odd: str) -> None:
    weights = starting_weights()
    if comm.rank == 1:
        if odd == "shape":
            weights["second"] = np.zeros((HIDDEN, OUTPUTS + 1))
        elif odd == "name":
            weights = {"other" if name == "second" else name: value for name, value in weights.items()}
        else:
            del weights["second"]
    try:
        make(comm, weights, 64)
    except MismatchError as error:
        if odd == "name":
            error.tensor = "second" if error.tensor in ("second", "other") else error.tensor
        raise


def recover_from_different_models(comm: Communicator, make: Make) -> int:
    with pytest.raises(MismatchError):
        build_different_models(comm, make, "shape")
    return int(comm.allreduce(np.array(1))[()])


def lose_a_peer(comm: Communicator, make: Make) -> None:
    model = make(comm, starting_weights(), 64)
    for step in range(3):
        if comm.rank == 1 and step == 1:
            multiring.shutdown()
            return
        model.zero_grad()
        model.backward(*batch(step, 3))
    raise AssertionError("nobody noticed that rank 1 had left")


def close_and_rebuild(comm: Communicator, make: Make) -> None:
    for _ in range(2):
        model = make(comm, starting_weights(), 64)
        model.backward(*batch(comm.rank, 3))
        before = bits(model.gradients())
        model.close()
        model.close()
        assert before["first"] is not None
