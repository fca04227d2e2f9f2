"""What goes wrong in a training loop of PyTensor, and what is left afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.raise_op import Assert

import multiring
from multiring import Communicator
from multiring.errors import MismatchError, MultiringError, TimeoutError
from multiring.pytensor import DistributedGradients, allreduce
from tests.adapters.pytensor.support import fast_run
from tests.on_ranks import Pool, all_raise
from tests.rank_pool import RankPool

SMALL: dict[str, Any] = {"bucket_bytes": 64, "first_bucket_bytes": 16}


def model(comm: Communicator, limit: float = np.inf) -> tuple[DistributedGradients, Any]:
    """A function that fails in the middle of the backward pass if an input exceeds `limit`."""
    x = pt.vector("x")
    params = [pytensor.shared(np.zeros(5), name=f"p{k}") for k in range(3)]
    gradients = DistributedGradients(params, comm, **SMALL)
    checked = Assert("the loss has exploded")(x, (x < limit).all())
    reduced = gradients.reduce([checked * 1, x * 2, x * 3]).gradients
    return gradients, pytensor.function([x], reduced, mode="FAST_COMPILE")


def test_a_step_that_fails_on_all_ranks_is_forgotten(comm: Communicator) -> None:
    gradients, f = model(comm, limit=10)
    for step in range(3):
        if step == 1:
            with pytest.raises(AssertionError, match="exploded"):
                f(np.full(5, 99.0))
            continue
        for k, value in enumerate(f(np.full(5, comm.rank + 1.0))):
            np.testing.assert_allclose(value, (k + 1) * (comm.size + 1) / 2, rtol=1e-14)
    gradients.close()


def fail_on_one(comm: Communicator) -> None:
    _, f = model(comm, limit=10)
    if comm.rank == 1:
        with pytest.raises(AssertionError, match="exploded"):
            f(np.full(5, 99.0))
        multiring.shutdown()
        raise RuntimeError("rank 1 gives up")
    f(np.ones(5))


def test_a_step_that_fails_on_one_rank_is_reported(ranks: Pool) -> None:
    first, second = ranks(2).run_expecting_errors(fail_on_one)
    assert isinstance(first, MultiringError), first
    assert "rank 1" in str(first)
    assert "gives up" in str(second)


@all_raise(MismatchError, "'statistics'", r"\[3\]", r"\[4\]")
def test_a_mismatch_inside_a_function(comm: Communicator) -> None:
    """The second step adds other things up on rank 1: same name, another shape."""
    own = comm.split(0)  # its error breaks what hangs off it, and the tests share `comm`
    assert own is not None
    x = pt.vector("x")
    params = [pytensor.shared(np.zeros(()), name="p")]
    total = allreduce(x, "statistics", comm=own).sum()
    reduced = DistributedGradients(params, own).reduce([total]).gradients
    f = pytensor.function([x], reduced, mode=fast_run())
    for step in range(2):
        f(np.ones(3 + step * comm.rank))


def one_calls_less(comm: Communicator) -> None:
    gradients, f = model(comm)
    f(np.ones(5))
    if comm.rank == 0:
        try:
            f(np.ones(5))
        finally:
            comm.send(np.zeros(1), 1)
    else:
        comm.recv(0, timeout=30)  # alive, but busy with something else
    gradients.close()


@pytest.mark.full
def test_a_rank_that_does_not_come_is_named() -> None:
    with RankPool(2, env={"MULTIRING_TIMEOUT": "3"}) as pool:
        error = pool.run_expecting_errors(one_calls_less, timeout=40.0)[0]
    assert isinstance(error, TimeoutError), error
    assert "rank 1" in str(error)
    assert "gradients[" in str(error)
