"""The callback on the Caffe-style solver over ranks: a dead rank, overlap, and the benchmark's reduction."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

import multiring.caffe
from multiring import Communicator
from multiring.benchmarks.gradients.frameworks.caffe import make_reduction
from tests.python.caffe.caffe_nets import make_solver


@pytest.mark.parametrize(("overlap", "iter_size"), [(False, 1), (True, 2)])
def test_ranks_with_equal_data_train_as_one(comm: Communicator, overlap: bool, iter_size: int) -> list[bytes]:
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


def test_the_reduction_that_is_measured(comm: Communicator) -> None:
    reduction = make_reduction([(3,), (200, 700), (5, 2)], comm)
    for step in range(3):
        reduction.run(float(comm.rank + step), comm.barrier)
        assert reduction.check(step + (comm.size - 1) / 2)
        assert not reduction.check(step + 100.0)
    reduction.close()
