"""What goes wrong in a Caffe training: nets that differ, failures, mismatches and killed ranks."""

from __future__ import annotations

import re

import numpy as np
import pytest

import multiring.caffe
from multiring import Communicator
from multiring.errors import MismatchError
from tests.adapters.caffe.support import SMALL, Pool, draw, expect, make_solver
from tests.support import REPOSITORY, start_job


def differ(comm: Communicator, what: str) -> None:
    solver = make_solver()
    frozen: list[str] = []
    if what == "bias" and comm.rank == 1:
        solver.net.layers[1].blobs.pop()
    if what == "frozen" and comm.rank == 1:
        frozen = ["empty"]
    multiring.caffe.SolverCallback(solver, comm, frozen=frozen)


@pytest.mark.parametrize(
    ("what", "text"), [("bias", r"'conv' float32 .*on rank 1"), ("frozen", r"'empty' float32")]
)
def test_nets_that_differ(ranks: Pool, what: str, text: str) -> None:
    for error in ranks(2).run_expecting_errors(differ, what):
        assert isinstance(error, MismatchError)
        assert re.search(text, str(error)), error


def fail_on_all(comm: Communicator) -> None:
    """An iteration that ends with an exception half-way leaves nothing behind."""
    solver = make_solver()
    callback = multiring.caffe.SolverCallback(solver, comm, overlap=True, iter_size=1, **SMALL)
    solver.add_callback(*callback)
    bad = draw(0)
    bad["conv"] = [np.zeros(7, np.float32)]
    with pytest.raises(ValueError, match="broadcast"):
        solver.step([bad])
    mine = [[draw(10 * rank)] for rank in range(comm.size)]
    solver.net.clear_param_diffs()
    solver.start()
    solver.net.backward(mine[comm.rank][0])
    solver.gradients_ready()
    expect(solver.net, mine)
    callback.close()


def test_an_iteration_that_fails_on_all_ranks(ranks: Pool) -> None:
    ranks(2).run(fail_on_all)


def extra_collective_on_one_rank(comm: Communicator) -> None:
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


def test_a_mismatch_inside_the_loop_is_an_error_on_every_rank(ranks: Pool) -> None:
    for error in ranks(2).run_expecting_errors(extra_collective_on_one_rank):
        assert isinstance(error, MismatchError), error
        assert "something else" in str(error)
        assert "gradients[0]" in str(error)


KILLED = """
import os, signal, time
import numpy as np
import multiring, multiring.caffe
from tests.adapters.caffe.support import draw, make_solver

comm = multiring.init()
solver = make_solver()
solver.add_callback(*multiring.caffe.SolverCallback(solver, overlap=True, bucket_bytes=64))

def die(layer):
    if comm.rank == 1 and solver.iter == 3 and layer == 3:
        comm.send(np.zeros(1), 0)  # rank 0 measures from here
        os.kill(os.getpid(), signal.SIGKILL)

solver.net.after_backward(die)
start = None
try:
    while True:
        if comm.rank == 0 and solver.iter == 3:
            comm.recv(1)
            start = time.monotonic()
        solver.step([draw(comm.rank)])
except multiring.MultiringError as error:
    seconds = time.monotonic() - start
    path = os.path.join(os.environ["TEST_DIRECTORY"], "seen")
    with open(path + ".new", "w") as file:
        file.write(f"{type(error).__name__} {seconds:.3f} {error}")
    os.rename(path + ".new", path)
    raise
"""


def test_a_killed_rank_is_reported_within_two_seconds() -> None:
    with start_job(2, KILLED, env={"PYTHONPATH": str(REPOSITORY)}) as job:
        name, seconds, text = job.wait_for_file("seen").split(" ", 2)
        assert name == "PeerLostError", text
        assert float(seconds) < 2.0
        assert "rank 1" in text
        assert "gradients[" in text
        job.finish()
        job.assert_nothing_left()
