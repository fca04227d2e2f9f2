"""What goes wrong in a Caffe training: nets that differ, failures, mismatches and killed ranks."""

from __future__ import annotations

import numpy as np
import pytest

import multiring.caffe
from multiring import Communicator
from multiring.errors import MismatchError
from tests.adapters.caffe.support import SMALL, draw, make_solver, run_and_check
from tests.on_ranks import all_raise


@all_raise(MismatchError, r"'empty' float32")
def test_layers_frozen_on_one_rank(comm: Communicator) -> None:
    multiring.caffe.SolverCallback(make_solver(), comm, frozen=["empty"] if comm.rank == 1 else [])


def test_an_iteration_that_fails_on_all_ranks(comm: Communicator) -> None:
    """An iteration that ends with an exception half-way leaves nothing behind."""
    solver = make_solver()
    callback = multiring.caffe.SolverCallback(solver, comm, overlap=True, iter_size=1, **SMALL)
    solver.add_callback(*callback)
    bad = draw(0)
    bad["conv"] = [np.zeros(7, np.float32)]
    with pytest.raises(ValueError, match="broadcast"):
        solver.step([bad])
    run_and_check(comm, solver)
    callback.close()


@all_raise(MismatchError, "something else", r"gradients\[0\]")
def test_a_mismatch_inside_the_loop_is_an_error_on_every_rank(comm: Communicator) -> None:
    """Rank 1 is an iteration ahead with another net: names and sizes are compared before data moves."""
    solver = make_solver()
    callback = multiring.caffe.SolverCallback(solver, comm)
    solver.add_callback(*callback)
    solver.start()
    if comm.rank == 1:
        assert callback._reducer.comm is not None
        callback._reducer.comm.allreduce(np.zeros(3), name="something else")
    solver.net.backward(draw(0))
    solver.gradients_ready()
