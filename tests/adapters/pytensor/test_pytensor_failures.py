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
from multiring.errors import MismatchError, MultiringError, PeerLostError, TimeoutError
from multiring.pytensor import DistributedGradients, allreduce
from tests.adapters.pytensor.support import Pool, fast_run
from tests.rank_pool import RankPool
from tests.support import start_job

SMALL: dict[str, Any] = {"bucket_bytes": 64, "first_bucket_bytes": 16}


def model(comm: Communicator, limit: float = np.inf) -> tuple[DistributedGradients, Any]:
    """A function that fails in the middle of the backward pass if an input exceeds `limit`."""
    x = pt.vector("x")
    params = [pytensor.shared(np.zeros(5), name=f"p{k}") for k in range(3)]
    gradients = DistributedGradients(params, comm, **SMALL)
    checked = Assert("the loss has exploded")(x, (x < limit).all())
    reduced = gradients.reduce([checked * 1, x * 2, x * 3]).gradients
    return gradients, pytensor.function([x], reduced, mode="FAST_COMPILE")


def fail_everywhere(comm: Communicator) -> None:
    gradients, f = model(comm, limit=10)
    for step in range(3):
        if step == 1:
            with pytest.raises(AssertionError, match="exploded"):
                f(np.full(5, 99.0))
            continue
        for k, value in enumerate(f(np.full(5, comm.rank + 1.0))):
            np.testing.assert_allclose(value, (k + 1) * (comm.size + 1) / 2, rtol=1e-14)
    gradients.close()


def test_a_step_that_fails_on_all_ranks_is_forgotten(ranks: Pool) -> None:
    ranks(2).run(fail_everywhere)


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


def different_models(comm: Communicator, mode: str) -> None:
    """The second step adds other things up on rank 1: same name, another shape."""
    own = comm.split(0)  # its error breaks what hangs off it, and the tests share `comm`
    assert own is not None
    x = pt.vector("x")
    params = [pytensor.shared(np.zeros(()), name="p")]
    total = allreduce(x, "statistics", comm=own).sum()
    reduced = DistributedGradients(params, own).reduce([total]).gradients
    f = pytensor.function([x], reduced, mode=fast_run() if mode == "fast_run" else mode)
    for step in range(2):
        f(np.ones(3 + step * comm.rank))


@pytest.mark.parametrize("mode", ["FAST_COMPILE", "fast_run"])
def test_a_mismatch_inside_a_function(ranks: Pool, mode: str) -> None:
    for error in ranks(2).run_expecting_errors(different_models, mode):
        assert isinstance(error, MismatchError), error
        assert "'statistics'" in str(error)
        assert "[3]" in str(error)
        assert "[4]" in str(error)


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


def test_a_rank_that_does_not_come_is_named() -> None:
    with RankPool(2, env={"MULTIRING_TIMEOUT": "3"}) as pool:
        error = pool.run_expecting_errors(one_calls_less, timeout=40.0)[0]
    assert isinstance(error, TimeoutError), error
    assert "rank 1" in str(error)
    assert "gradients[" in str(error)


TRAIN = """
import os, signal, sys
import numpy as np, pytensor, pytensor.tensor as pt
import multiring, multiring.pytensor

comm = multiring.init()
x = pt.matrix("x")
w = pytensor.shared(np.eye(3), name="w")
cost = ((x @ w) ** 2).mean()
grads = multiring.pytensor.grad(cost, [w])
train = pytensor.function([x], cost, updates=[(w, w - 0.01 * grads[0])], mode="FAST_COMPILE")
for step in range(100000):
    if comm.rank == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        train(np.ones((4, 3)))
    except multiring.MultiringError as error:
        print(f"step {step} on rank {comm.rank}: {type(error).__name__}: {error}", flush=True)
        sys.exit(3)
"""


def test_a_killed_rank_is_reported_by_all_others(tmp_path: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with start_job(3, script) as job:
        result = job.finish(timeout=60.0)
        job.assert_nothing_left()
    assert result.returncode != 0
    for rank in (0, 2):
        line = next(line for line in result.stdout.splitlines() if f"on rank {rank}:" in line)
        assert f"step 5 on rank {rank}: {PeerLostError.__name__}" in line
        assert "lost rank 1" in line
