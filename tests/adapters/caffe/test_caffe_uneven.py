"""Ranks that have more iterations or larger batches than others."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import multiring.caffe
from multiring import Communicator
from multiring.errors import MismatchError
from tests.adapters.caffe.support import FakeSolver, bits, draw, make_solver
from tests.on_ranks import all_raise, on_ranks, same_everywhere
from tests.python.caffe import caffe_nets


class OldSolver(FakeSolver):
    """Of before 2017."""

    @property
    def apply_update(self) -> Any:
        raise AttributeError("apply_update")


@on_ranks(3)
@all_raise(
    MismatchError, updates={True: None, False: "'iteration' 0.0 on rank 0, but 'iteration' 2.0 on rank 1"}
)
def test_uneven_data_with_momentum(comm: Communicator, updates: bool) -> None:
    """Ranks that have left join() update as the others do, so histories and iterations stay the same."""
    solver, alone = make_solver(), make_solver()
    for one in (solver, alone):
        one.momentum = 0.9
    if not updates:
        solver.__class__ = OldSolver
    callback = multiring.caffe.SolverCallback(solver, comm)
    solver.add_callback(*callback)

    def step(number: int) -> None:
        solver.net.clear_param_diffs()
        solver.start()
        solver.net.backward(draw(10 * number + comm.rank))
        solver.gradients_ready()
        solver.update(solver.rate)

    def step_alone(number: int, active: list[int]) -> None:
        alone.net.clear_param_diffs()
        for rank in active:
            alone.net.backward(draw(10 * number + rank))
        for one in {id(one._diff): one for blobs in alone.net.params.values() for one in blobs}.values():
            one.diff[...] /= len(active)
        alone.update(alone.rate)

    with callback.join():
        for number in range(2 * comm.rank):
            step(number)
    for number in range(2 * comm.size - 2):
        step_alone(number, [rank for rank in range(comm.size) if number < 2 * rank])
    for number in range(10, 13):
        step(number)
        step_alone(number, list(range(comm.size)))
    assert solver.iter == alone.iter
    assert same_everywhere(comm, bits(solver.net))
    for one, other in zip(solver.net.params["conv"], alone.net.params["conv"], strict=True):
        np.testing.assert_allclose(one.data, other.data, rtol=1e-5, atol=1e-5)
    callback.close()


@all_raise(
    MismatchError,
    policy={"fixed": None, "poly": r"'max_iter' .*3.* on rank 0, but 'max_iter' .*4.* on rank 1"},
)
def test_ranks_that_stop_at_iterations_of_their_own(comm: Communicator, policy: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        text = f'max_iter: {3 + comm.rank} lr_policy: "{policy}" power: 1 momentum: 0.9'
        solver = caffe_nets.make_solver(Path(name), text)
    callback = multiring.caffe.SolverCallback(solver, comm, check_every=1)
    solver.add_callback(*callback)
    with callback.join():
        solver.step(solver.param.max_iter)
    solver.step(2)
    assert same_everywhere(comm, bits(solver.net))


@on_ranks(3)
def test_batches_that_differ_in_size(comm: Communicator) -> None:
    """The weight is what the diff of the loss is filled with, as Caffe does with its `loss_weight`."""
    counts = [1, 5, 3]
    generator = np.random.default_rng(0)
    images, labels = generator.standard_normal((9, 2, 3, 3)), np.arange(9.0) % 3
    solvers = []
    for begin, count in ((sum(counts[: comm.rank]), counts[comm.rank]), (0, 9)):
        with tempfile.TemporaryDirectory() as name:
            net = caffe_nets.SMALL.replace("batch_size: 4", f"batch_size: {count}")
            solver = caffe_nets.make_solver(Path(name), "momentum: 0.9", net, samples=count)
        solver.net.set_input_arrays(images[begin : begin + count], labels[begin : begin + count])
        solvers.append(solver)
    mine, alone = solvers
    mine.add_callback(*multiring.caffe.SolverCallback(mine, comm, overlap=True, iter_size=1))
    for _ in range(3):
        mine.net.blobs["loss"].diff[...] = multiring.caffe.batch_weight(counts[comm.rank], comm)
        for solver in solvers:
            solver.step(1)
    for one, other in zip(mine.net.learnable, alone.net.learnable, strict=True):
        np.testing.assert_allclose(one.blob.data, other.blob.data, rtol=1e-10, atol=1e-12)
