"""What would give wrong results silently in PyTensor and NumPy: an error on every rank, or right."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import multiring.numpy
import multiring.pytensor
from multiring import Communicator
from multiring.errors import MismatchError, UsageError
from multiring.pytensor import DistributedGradients, distribute_updates, grad
from tests.adapters.pytensor.support import Array
from tests.on_ranks import Pool, on_ranks, same_everywhere


def model() -> tuple[Any, Any, list[Any], list[Any]]:
    """Images, cost, parameters and velocities."""
    x = pt.matrix("x")
    w, b = pytensor.shared(np.arange(3.0), name="w"), pytensor.shared(np.array(1.0), name="b")
    velocities = [pytensor.shared(0 * p.get_value(), name=f"v{p.name}") for p in (w, b)]
    return x, ((x @ w + b) ** 2).mean(), [w, b], velocities


def data(rank: int, step: int = 0, rows: int = 4) -> Array:
    return np.random.default_rng([rank, step]).standard_normal((rows, 3))


def trains(comm: Communicator, every: int, what: str, drift_at: int, rate: float = 0.1) -> int:
    """Train; the state of rank 1 changes before one step. The number of the call that raises."""
    x, cost, params, velocities = model()
    grads = pytensor.grad(cost, params)
    step = rate * (1 + (comm.rank if what == "rate" else 0))
    new = [0.9 * v + g for v, g in zip(velocities, grads, strict=True)]
    updates = [*zip(velocities, new, strict=True)]
    updates += [(p, p - step * v) for p, v in zip(params, new, strict=True)]
    updates = distribute_updates(updates, params, grads, comm, check_every=every)
    train = pytensor.function([x], cost, updates=updates, mode="FAST_COMPILE")
    drifting = {"vb": velocities[1]}.get(what)
    for number in range(1, 9):
        if drifting is not None and number == drift_at and comm.rank == 1:
            drifting.set_value(np.nextafter(drifting.get_value(), np.inf))
        try:
            train(data(comm.rank, number))
        except MismatchError as error:
            assert f"training state at step {number}" in str(error)
            assert f"{'w' if what == 'rate' else what}' float64" in str(error)
            assert "on rank 1" in str(error)
            return number
    return 0


@pytest.mark.parametrize(
    ("every", "what", "drift_at", "found_at"),
    [(4, "vb", 8, 8), (100, "rate", 0, 2), (0, "vb", 1, 0)],
)
def test_shared_variables_that_differ_are_an_error_on_all_ranks(
    comm: Communicator, every: int, what: str, drift_at: int, found_at: int
) -> None:
    assert trains(comm, every, what, drift_at) == found_at


@on_ranks(3)
def test_ranks_without_data_answer_the_check(comm: Communicator) -> None:
    x, cost, params, _ = model()
    gradients = DistributedGradients(params, comm, check_every=1)
    averaged = gradients.reduce(pytensor.grad(cost, params)).gradients
    updates = [(p, p - 0.1 * g) for p, g in zip(params, averaged, strict=True)]
    train = pytensor.function([x], cost, updates=updates, mode="FAST_COMPILE")
    with gradients.join():
        for step in range(2 + comm.rank):
            train(data(comm.rank, step))
    assert same_everywhere(comm, [p.get_value().tobytes() for p in params])


@on_ranks(3)
def test_buffers_and_weights_of_ranks(comm: Communicator) -> None:
    mean = pytensor.shared(np.full(2, float(comm.rank)), name="mean")
    count = pytensor.shared(np.array(comm.rank + 3), name="count")
    multiring.pytensor.sync_buffers([mean, count], "average", comm)
    np.testing.assert_array_equal(mean.get_value(), np.full(2, (comm.size - 1) / 2))
    assert count.get_value() == 3
    arrays = {"mean": np.full(2, float(comm.rank))}
    multiring.numpy.sync_buffers(arrays, comm=comm)
    np.testing.assert_array_equal(arrays["mean"], 0)
    with pytest.raises(UsageError, match="accepted: broadcast, average, local"):
        multiring.pytensor.sync_buffers([mean], "max", comm)  # type: ignore[arg-type]
    counts = [3, 0, 5][: comm.size]
    x, cost, params, _ = model()
    weight = pt.scalar("weight")
    rows = np.concatenate([data(rank, 0, n) for rank, n in enumerate(counts)])
    mine = data(comm.rank, 0, counts[comm.rank]) if counts[comm.rank] else np.zeros((1, 3))
    found = pytensor.function([x, weight], grad(cost * weight, params, comm), mode="FAST_COMPILE")
    wanted = pytensor.function([x], pytensor.grad(cost, params), mode="FAST_COMPILE")
    scale = multiring.pytensor.batch_weight(counts[comm.rank], comm)
    assert scale == multiring.numpy.batch_weight(counts[comm.rank], comm)
    for one, other in zip(found(mine, scale), wanted(rows), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


def test_gradients_that_are_reduced_twice_are_refused(comm: Communicator) -> None:
    _, cost, params, _ = model()
    averaged = grad(cost, params, comm)
    updates = [(p, p - 0.1 * g) for p, g in zip(params, averaged, strict=True)]
    with pytest.raises(UsageError, match="the gradient of 'w' has been reduced over these ranks already"):
        distribute_updates(updates, params, averaged, comm)


@on_ranks(3)
def test_reductions_of_one_name_keep_their_order(comm: Communicator) -> None:
    """Reductions of one name in one function, reached at different times, do not swap."""
    x, work = pt.vector("x"), pt.matrix("work")
    late = x + pt.sum(work @ work @ work)
    first = multiring.pytensor.allreduce(late, "total", comm=comm)
    second = multiring.pytensor.allreduce(100 * x, "total", comm=comm)
    function = pytensor.function([x, work], [second, first], mode="FAST_COMPILE")
    for slow in range(comm.size + 1):
        found = function(np.ones(3), np.zeros([1 + 300 * (comm.rank == slow)] * 2))
        np.testing.assert_array_equal(found[0], 100 * comm.size)
        np.testing.assert_array_equal(found[1], comm.size)


def one_name_in_two_threads(comm: Communicator) -> None:
    group = comm.split(0)
    x = pt.vector("x")
    total = multiring.pytensor.allreduce(x, "total", comm=group)
    functions = [pytensor.function([x], k * total, mode="FAST_COMPILE") for k in range(2)]
    both = threading.Barrier(2)

    def call(function: Any) -> Any:
        both.wait()
        return function(np.ones(3))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(call, functions))


def test_a_name_belongs_to_one_thread(ranks: Pool) -> None:
    errors = ranks(2).run_expecting_errors(one_name_in_two_threads)
    assert any("'total' was called from thread" in str(error) for error in errors), errors
    assert all(isinstance(error, Exception) for error in errors)
