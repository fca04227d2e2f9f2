"""The callback on the Caffe-style solver over ranks: a dead rank, overlap, and the benchmark's reduction."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

import multiring.caffe
from multiring import Communicator
from multiring.benchmarks.gradients.frameworks.caffe import make_reduction
from tests.adapters.caffe.support import Pool
from tests.python.caffe.caffe_nets import make_solver
from tests.support import REPOSITORY, start_job


def train(comm: Communicator, overlap: bool, iter_size: int) -> list[bytes]:
    """All ranks have the same data, so the average is what one rank computes, bit for bit for 2 ranks."""
    with tempfile.TemporaryDirectory() as name:
        text = f"iter_size: {iter_size} momentum: 0.9 weight_decay: 0.01 random_seed: {comm.rank}"
        solver = make_solver(Path(name), text)
        alone = make_solver(Path(name), text.replace(f"random_seed: {comm.rank}", "random_seed: 0"))
    callback = multiring.caffe.SolverCallback(
        solver, comm, overlap=overlap, frozen=solver.net.frozen_layers(), bucket_bytes=64
    )
    solver.add_callback(*callback)
    solver.step(4)
    alone.step(4)
    bits = [one.blob.data.tobytes() for one in solver.net.learnable]
    assert bits == [one.blob.data.tobytes() for one in alone.net.learnable]
    assert "fixed" not in callback.produced
    callback.close()
    return bits


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("iter_size", [1, 2])
def test_ranks_with_equal_data_train_as_one(ranks: Pool, overlap: bool, iter_size: int) -> None:
    results = ranks(2).run(train, overlap, iter_size)
    assert results[0] == results[1]


def reduce_for_the_benchmark(comm: Communicator) -> None:
    reduction = make_reduction([(3,), (200, 700), (5, 2)], comm)
    for step in range(3):
        reduction.run(float(comm.rank + step), comm.barrier)
        assert reduction.check(step + (comm.size - 1) / 2)
        assert not reduction.check(step + 100.0)
    reduction.close()


@pytest.mark.parametrize("size", [1, 2])
def test_the_reduction_that_is_measured(ranks: Pool, size: int) -> None:
    ranks(size).run(reduce_for_the_benchmark)


KILLED = """
import os, pathlib, signal, time
import multiring, multiring.caffe
from tests.adapters.caffe.support import Pool
from tests.python.caffe.caffe_nets import make_solver

comm = multiring.init()
directory = pathlib.Path(os.environ["TEST_DIRECTORY"]) / str(comm.rank)
directory.mkdir()
solver = make_solver(directory, "max_iter: 1000000")
solver.add_callback(*multiring.caffe.SolverCallback(solver, overlap=True, bucket_bytes=64))

def die(layer):
    if comm.rank == 1 and solver.iter == 3 and layer == 4:
        os.kill(os.getpid(), signal.SIGKILL)

solver.net.after_backward(die)
try:
    solver.step(1000000)
except multiring.MultiringError as error:
    path = os.path.join(os.environ["TEST_DIRECTORY"], "seen")
    with open(path + ".new", "w") as file:
        file.write(f"{type(error).__name__} {error}")
    os.rename(path + ".new", path)
    raise
"""


def test_a_killed_rank_ends_the_solvers_loop() -> None:
    with start_job(2, KILLED, env={"PYTHONPATH": str(REPOSITORY)}) as job:
        text = job.wait_for_file("seen")
        assert text.startswith("PeerLostError")
        assert "rank 1" in text
        assert "gradients[" in text
        job.finish()
        job.assert_nothing_left()
