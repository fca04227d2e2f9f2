"""What goes wrong in a Caffe training: nets that differ, failures, mismatches and killed ranks."""

from __future__ import annotations

import numpy as np
import pytest

import multiring.caffe
from multiring import Communicator
from multiring.errors import MismatchError
from tests.adapters.caffe.support import SMALL, draw, make_solver, run_and_check
from tests.on_ranks import all_raise


@all_raise(
    MismatchError,
    what={
        "bias": r"'conv' float32 .*on rank 1",
        "frozen": r"'empty' float32",
    },
)
def test_nets_that_differ(comm: Communicator, what: str) -> None:
    solver = make_solver()
    frozen: list[str] = []
    if what == "bias" and comm.rank == 1:
        solver.net.layers[1].blobs.pop()
    if what == "frozen" and comm.rank == 1:
        frozen = ["empty"]
    multiring.caffe.SolverCallback(solver, comm, frozen=frozen)


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
