"""What every adapter has to do, whatever the framework: the same tests, with NumPy as the oracle.

A test module of an adapter derives a class from `AdapterUnderTest`, and one from `AdapterContract`, whose
attribute `adapter` is the first. The model, in float64, where `extra` is a head that a batch may leave out:

    hidden = tanh(x @ first + offset)
    output = hidden @ second  [+ hidden @ extra]
    loss   = sum((output - y) ** 2) / (2 * len(x))
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

import multiring
from multiring import Communicator
from multiring.errors import AbortedError, MismatchError, PeerLostError
from tests.nursery import Nursery
from tests.on_ranks import Pool, on_ranks, same_everywhere

INPUTS, HIDDEN, OUTPUTS = 5, 7, 3
RATE = 0.1
TIGHT = {"rtol": 1e-12, "atol": 1e-14}
Array = NDArray[np.float64]
Weights = dict[str, Array]


class AdapterUnderTest:
    """A model of one framework whose gradients are averaged over ranks.

    `package` is the adapter, `_model` what its `broadcast_parameters` takes, and `_reduction` what joins and
    closes. The methods without a body are for subclasses.
    """

    package: ClassVar[Any]
    _comm: Communicator
    _model: Any
    _reduction: Any

    def __init__(
        self, comm: Communicator, weights: Mapping[str, Array], bucket_bytes: int, **options: Any
    ) -> None:
        """Build the model and register it; buckets hold `bucket_bytes`, the first one too. Collective.

        `check_every` in `options` is what all adapters take.
        """

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
        self.package.broadcast_parameters(self._model, root, self._comm)

    def average_metrics(self, metrics: Mapping[str, float], count: float) -> dict[str, float]:
        """Average over ranks, weighted by count. Collective."""
        averages: dict[str, float] = self.package.average_metrics(metrics, count, comm=self._comm)
        return averages

    def join(self) -> AbstractContextManager[None]:
        """Context of a loop with uneven data."""
        context: AbstractContextManager[None] = self._reduction.join()
        return context

    def close(self) -> None:
        """Release everything."""
        self._reduction.close()


Adapter = AdapterUnderTest
Make = Callable[..., AdapterUnderTest]


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
    names = dict.fromkeys(name for one in gradients for name in one)  # in one order on all ranks
    return {name: sum(one[name] for one in gradients if name in one) / size for name in names}


def compare(actual: Mapping[str, Array | None], expected: Mapping[str, Array]) -> None:
    assert {name for name, value in actual.items() if value is not None} == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, **TIGHT, err_msg=name)


def bits(arrays: Mapping[str, Array | None]) -> dict[str, bytes | None]:
    return {name: None if value is None else np.asarray(value).tobytes() for name, value in arrays.items()}


class AdapterContract:
    """The suite, on three ranks; small buckets make several of them. `IN_ONE`: what one rank does as well."""

    adapter: ClassVar[Make]
    IN_ONE: ClassVar[tuple[str, ...]] = (
        "test_gradients_are_averaged",
        "test_ranks_train_like_one",
        "test_a_parameter_is_unused_on_all_ranks",
        "test_gradients_are_accumulated",
        "test_state_is_broadcast",
        "test_metrics_are_weighted",
        "test_uneven_data",
    )

    @on_ranks(3)
    def test_gradients_are_averaged(self, comm: Communicator) -> list[Any]:
        """Ranks have batches of different size; the weights of all batches are those of the start. What is
        closed may be closed again, and another model be made."""
        weights = starting_weights()
        found = []
        for bucket_bytes in (64, 1 << 20):
            model = self.adapter(comm, weights, bucket_bytes)
            for step in range(3):
                batches = [batch(10 * step + rank, rank + 1) for rank in range(comm.size)]
                model.zero_grad()
                model.backward(*batches[comm.rank])
                compare(model.gradients(), mean([oracle(weights, x, y)[1] for x, y in batches], comm.size))
                found.append(bits(model.gradients()))
            model.close()
            model.close()
        return found

    def train(self, comm: Communicator, steps: int) -> list[Any]:
        """The oracle alone with the batches of all ranks has the same losses."""
        weights = starting_weights()
        model = self.adapter(comm, starting_weights(), 200)
        history: list[Any] = []
        for step in range(steps):
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

    @on_ranks(3)
    def test_ranks_train_like_one(self, comm: Communicator) -> list[Any]:
        """And a second time with the same bits."""
        history = self.train(comm, 30)
        assert self.train(comm, 5) == history[:5]
        return history

    @on_ranks(3)
    def test_a_parameter_is_unused_on_some_ranks(self, comm: Communicator) -> None:
        """Ranks without a gradient count as zeros, also for one that only they lack in a later step."""
        weights = starting_weights()
        model = self.adapter(comm, weights, 64)
        for step in range(3):
            uses = [(rank + step) % comm.size == 0 for rank in range(comm.size)]
            batches = [batch(10 * step + rank, 3) for rank in range(comm.size)]
            model.zero_grad()
            model.backward(*batches[comm.rank], extra=uses[comm.rank])
            gradients = [oracle(weights, *batches[r], extra=uses[r])[1] for r in range(comm.size)]
            compare(model.gradients(), mean(gradients, comm.size))
        model.close()

    @on_ranks(3)
    def test_a_parameter_is_unused_on_all_ranks(self, comm: Communicator) -> None:
        """No gradient appears where no rank has one; one that is there stays bit for bit."""
        model = self.adapter(comm, starting_weights(), 400)
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

    @on_ranks(3)
    def test_gradients_are_accumulated(self, comm: Communicator) -> None:
        """Local passes and one reduction, in which a parameter may occur in an early pass only; then another
        without zeroing, which adds up to the sum of both averages."""
        weights = starting_weights()
        model = self.adapter(comm, weights, 64)
        for step in range(2):
            model.zero_grad()
            count = 3 + step  # passes, the fourth of which is reduced by itself
            batches = [
                [batch(100 * step + 10 * rank + k, k + 1) for k in range(count)] for rank in range(comm.size)
            ]
            uses = [[k == 0 or (k == 3 and rank == 0) for k in range(count)] for rank in range(comm.size)]
            for k, (x, y) in enumerate(batches[comm.rank]):
                model.backward(x, y, extra=uses[comm.rank][k], synchronise=k >= 2)
                if k < 2:
                    continue
                sums = []
                for mine, used in zip(batches, uses, strict=True):
                    parts = [oracle(weights, *mine[j], extra=used[j])[1] for j in range(k + 1)]
                    sums.append({name: sum(part.get(name, 0.0) for part in parts) for name in parts[0]})
                compare(model.gradients(), mean(sums, comm.size))
        model.close()

    @on_ranks(3)
    def test_state_is_broadcast(self, comm: Communicator) -> None:
        root = comm.size - 1
        model = self.adapter(comm, starting_weights(seed=comm.rank), 64)
        model.broadcast(root)
        assert bits(model.weights()) == bits(starting_weights(seed=root))
        model.close()

    @on_ranks(3)
    def test_metrics_are_weighted(self, comm: Communicator) -> None:
        """Rank 0 saw nothing; its value, even if it is no number, does not matter."""
        model = self.adapter(comm, starting_weights(), 64)
        rank = comm.rank
        if comm.size > 1:
            values = {"loss": 1.0 / rank if rank else float("nan"), "accuracy": float(rank)}
            averages = model.average_metrics(values, rank)
            weights = np.arange(comm.size)
            wanted = {"loss": comm.size - 1, "accuracy": (weights**2).sum()}
            assert averages == pytest.approx({k: v / weights.sum() for k, v in wanted.items()}, rel=1e-14)
            assert list(averages) == ["loss", "accuracy"]
        assert np.isnan(model.average_metrics({"loss": 1.0}, 0)["loss"])
        assert model.average_metrics({"loss": 0.25}, 3) == {"loss": 0.25}
        model.close()

    @on_ranks(3)
    def test_uneven_data(self, comm: Communicator) -> None:
        """Rank r has r batches, or two more; averages divide by the ranks that still have one."""
        expected = starting_weights()
        model = self.adapter(comm, starting_weights(), 100)
        for fewest in (0, 2):
            for step in range(fewest + comm.size - 1):
                active = [rank for rank in range(comm.size) if step < fewest + rank]
                gradients = [oracle(expected, *batch(100 * fewest + 10 * step + r, 3))[1] for r in active]
                average = mean(gradients, len(active))
                expected = {name: value - RATE * average[name] for name, value in expected.items()}
            with model.join():
                for step in range(fewest + comm.rank):
                    model.zero_grad()
                    model.backward(*batch(100 * fewest + 10 * step + comm.rank, 3))
                    model.step(RATE)
            compare(model.weights(), expected)
            assert same_everywhere(comm, bits(model.weights()))
        model.close()

    @on_ranks(3)
    def test_different_models_are_refused(self, comm: Communicator) -> None:
        """And the communicator is as it was."""
        for odd in ("shape", "name", "missing"):
            weights = starting_weights()
            if comm.rank == 1 and odd == "shape":
                weights["second"] = np.zeros((HIDDEN, OUTPUTS + 1))
            elif comm.rank == 1:
                weights = {"other" if name == "second" else name: w for name, w in weights.items()}
                if odd == "missing":
                    del weights["other"]
            with pytest.raises(MismatchError) as raised:
                self.adapter(comm, weights, 64)
            assert "on rank 1" in str(raised.value)
            assert "on ranks 0, 2" in str(raised.value)
            assert raised.value.tensor in (("second", "other") if odd == "name" else ("second",))
        assert comm.allreduce(np.array(1)) == comm.size

    def test_a_rank_that_leaves_is_reported(self, ranks: Pool) -> None:
        errors = ranks(3).run_expecting_errors(train_without_rank_1, self.adapter, multiring.shutdown)
        assert errors[1] is None
        for error in (errors[0], errors[2]):
            assert isinstance(error, PeerLostError | AbortedError), error
            assert "rank 1" in str(error)

    def test_a_killed_rank_is_reported(self, nursery: Nursery) -> None:
        outcomes = nursery.run(3, train_without_rank_1, self.adapter, kill, timeout=120.0)
        assert outcomes[1].status == -signal.SIGKILL, outcomes[1].trace
        for outcome in (outcomes[0], outcomes[2]):
            assert isinstance(outcome.error, PeerLostError), outcome.trace
            assert "rank 1" in str(outcome.error)
            assert re.search("gradients|first|offset|second|extra", str(outcome.error)), outcome.error
            assert outcome.error.peer == 1, outcome.error
            where = outcome.error.rank, outcome.error.host
            assert None not in (*where, outcome.error.operation, outcome.error.tensor)

    @on_ranks(3)
    def test_weights_that_drift_are_found(self, comm: Communicator) -> None:
        """Rank 1's first step is larger, or its third: what ranks compare in the second, and in every fourth,
        is no longer the same, which is an error on all of them."""
        for larger, found in ((1, 2), (3, 4)):
            group = comm.split(0)  # the error breaks it
            assert group is not None
            model = self.adapter(group, starting_weights(), 64, check_every=4)
            for step in range(1, found):
                model.zero_grad()
                model.backward(*batch(comm.rank, 3))
                model.step(2 * RATE if comm.rank == 1 and step == larger else RATE)
            model.zero_grad()
            with pytest.raises(MismatchError) as raised:
                model.backward(*batch(comm.rank, 3))
                model.step(RATE)
            message = str(raised.value)
            assert re.search(rf"training state.* at step {found}\b", message), message
            assert re.search("'[^']*(first|offset|second|extra|lr)[^']*'", message), message
            assert "rank 1" in message
            assert raised.value.rank == comm.rank
            assert raised.value.tensor
            assert raised.value.tensor in message

    @on_ranks(1)
    def test_one_rank(self, comm: Communicator) -> None:
        for name in self.IN_ONE:
            getattr(self, name)(comm)


def train_without_rank_1(comm: Communicator, make: Make, leave: Callable[[], None]) -> None:
    model = make(comm, starting_weights(), 64)
    for step in range(4):
        model.zero_grad()
        if comm.rank == 1 and step == 2:
            leave()
            return
        model.backward(*batch(step, 3))
    raise AssertionError("no rank has noticed that rank 1 has left")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
