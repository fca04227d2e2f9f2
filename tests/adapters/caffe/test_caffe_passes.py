"""Backward passes that are not those of an iteration, and gradients that change at the wrong time."""

from __future__ import annotations

import pytest

import multiring.caffe
from multiring import Communicator
from multiring.errors import MismatchError, UsageError
from tests.adapters.caffe.support import SMALL, bits, draw, expect, make_solver
from tests.on_ranks import all_raise, same_everywhere


@pytest.mark.parametrize(("overlap", "iter_size", "count"), [(True, 1, 1), (True, None, 2), (False, None, 2)])
def test_backward_passes_outside_of_an_iteration(
    comm: Communicator, overlap: bool, iter_size: int | None, count: int
) -> None:
    """Rank 0 runs backward passes outside of iterations, to look at gradients."""
    solver = make_solver()
    callback = multiring.caffe.SolverCallback(solver, comm, overlap=overlap, iter_size=iter_size, **SMALL)
    solver.add_callback(*callback)
    for step in range(4):
        for number in range(step if comm.rank == 0 else 0):
            solver.net.backward(draw(7 + number), skip=("conv", "twin_a"))
        passes = [[draw(1000 * step + 10 * rank + k) for k in range(count)] for rank in range(comm.size)]
        solver.step(passes[comm.rank])
        expect(solver.net, passes)
        assert callback.produced == {"conv[0]", "conv[1]", "twin_a", "empty"}
    assert same_everywhere(comm, bits(solver.net))
    callback.close()


def test_one_value_changed_before_it_is_reduced(comm: Communicator) -> None:
    solver = make_solver()
    callback = multiring.caffe.SolverCallback(solver, comm, overlap=True, iter_size=1, **SMALL)

    def mask() -> None:
        solver.net.params["conv"][0].diff.reshape(-1)[-2] = 0

    solver.add_callback(lambda: None, mask)
    solver.add_callback(*callback)
    with pytest.raises(UsageError, match=r"'conv\[0\]' was changed after it had been sent"):
        solver.step([draw(comm.rank)])
    callback.close()


def test_gradients_changed_before_they_are_reduced(comm: Communicator) -> None:
    solver = make_solver()

    def double() -> None:
        for one in solver.net.params["conv"]:
            one.diff[...] *= 2

    solver.add_callback(lambda: None, double)
    callback = multiring.caffe.SolverCallback(solver, comm, overlap=False, iter_size=1, **SMALL)
    solver.add_callback(*callback)
    mine = [[draw(rank)] for rank in range(comm.size)]
    solver.step(mine[comm.rank])
    for one in solver.net.params["conv"]:
        one.diff[...] /= 2
    expect(solver.net, mine)
    callback.close()


def test_refused(comm: Communicator) -> None:
    solver = make_solver()
    _, on_gradients_ready = multiring.caffe.SolverCallback(solver, comm)
    with pytest.raises(UsageError, match="came before on_start"):
        on_gradients_ready()
    with pytest.raises(UsageError, match="buffers is 'some'"):
        multiring.caffe.SolverCallback(make_solver(), comm, buffers="some")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="already, and gradients would be reduced twice; close"):
        multiring.caffe.SolverCallback(solver, comm)


def test_a_callback_that_was_not_added(comm: Communicator) -> None:
    solver = make_solver()
    callback = multiring.caffe.SolverCallback(solver, comm)
    solver.iter = 100  # a snapshot was restored
    solver.net.backward(draw(0))
    solver.net.backward(draw(0))
    solver.step([draw(0)])
    with pytest.raises(UsageError, match=r"trains without its SolverCallback.*call solver.add_callback"):
        solver.step([draw(0)])
    solver.add_callback(*callback)
    solver.step([draw(0)])
    solver.net.backward(draw(0))
    callback.close()


@pytest.mark.parametrize("buckets", [{}, SMALL])
@all_raise(MismatchError)
def test_a_backward_pass_after_a_failed_iteration(comm: Communicator, buckets: dict[str, int]) -> None:
    """All ranks skip an iteration that fails; one looks at gradients before it goes on, which Caffe cannot
    tell from that iteration's own backward pass."""
    solver = make_solver()
    callback = multiring.caffe.SolverCallback(solver, comm, overlap=True, iter_size=1, **buckets)
    solver.add_callback(*callback)
    solver.step([draw(0)])
    solver.net.clear_param_diffs()
    solver.start()
    if comm.rank == 0:
        solver.net.backward(draw(1))
    for step in range(3):
        solver.step([draw(10 * step + comm.rank)])
