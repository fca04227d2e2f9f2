"""Backward passes that are not those of an iteration, and gradients that change at the wrong time."""

from __future__ import annotations

import pytest

from multiring import Communicator
from multiring.caffe import SolverCallback
from multiring.errors import MismatchError, UsageError
from tests.adapters.caffe.support import SMALL, add_callback, bits, draw, expect, make_solver
from tests.adapters.caffe.test_caffe_callback import PRODUCED
from tests.on_ranks import all_raise, same_everywhere


@pytest.mark.parametrize(("overlap", "iter_size", "count"), [(True, 1, 1), (True, None, 2), (False, None, 2)])
def test_backward_passes_outside_of_an_iteration(
    comm: Communicator, overlap: bool, iter_size: int | None, count: int
) -> None:
    """Rank 0 runs backward passes outside of iterations, to look at gradients."""
    solver = make_solver()
    callback = add_callback(solver, comm, overlap=overlap, iter_size=iter_size, **SMALL)
    for step in range(4):
        for number in range(step if comm.rank == 0 else 0):
            solver.net.backward(draw(7 + number), skip=("conv", "twin_a"))
        passes = [[draw(1000 * step + 10 * rank + k) for k in range(count)] for rank in range(comm.size)]
        solver.step(passes[comm.rank])
        expect(solver.net, passes)
        assert callback.produced == PRODUCED
    assert same_everywhere(comm, bits(solver.net))


def test_a_callback_that_was_not_added(comm: Communicator) -> None:
    solver = make_solver()
    callback = SolverCallback(solver, comm)
    solver.iter = 100  # a snapshot was restored
    solver.net.backward(draw(0))
    solver.net.backward(draw(0))
    solver.step([draw(0)])
    with pytest.raises(UsageError, match=r"trains without its SolverCallback.*call solver.add_callback"):
        solver.step([draw(0)])
    solver.add_callback(*callback)
    solver.step([draw(0)])
    solver.net.backward(draw(0))


@pytest.mark.parametrize("buckets", [{}, SMALL])
@all_raise(MismatchError)
def test_a_backward_pass_after_a_failed_iteration(comm: Communicator, buckets: dict[str, int]) -> None:
    """One rank looks at gradients then, which Caffe cannot tell from that iteration's own backward pass."""
    solver = make_solver()
    add_callback(solver, comm, overlap=True, iter_size=1, **buckets)
    solver.step([draw(0)])
    solver.net.clear_param_diffs()
    solver.start()
    if comm.rank == 0:
        solver.net.backward(draw(1))
    for step in range(3):
        solver.step([draw(10 * step + comm.rank)])


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_changed_before_they_are_reduced(comm: Communicator, overlap: bool) -> None:
    solver = make_solver()

    def double() -> None:
        solver.net.params["conv"][0].diff.reshape(-1)[-2] *= 2

    solver.add_callback(lambda: None, double)
    add_callback(solver, comm, overlap=overlap, iter_size=1, **SMALL)
    mine = [[draw(rank)] for rank in range(comm.size)]
    if overlap:
        with pytest.raises(UsageError, match=r"'conv\[0\]' was changed after it had been sent"):
            solver.step(mine[comm.rank])
        return
    solver.step(mine[comm.rank])
    solver.net.params["conv"][0].diff.reshape(-1)[-2] /= 2
    expect(solver.net, mine)
