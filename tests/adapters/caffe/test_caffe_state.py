"""Settings, histories, snapshots and statistics of the ranks' solvers: the same, or an error."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import multiring.caffe
from multiring import Communicator
from multiring.errors import MismatchError
from tests.adapters.caffe.support import (
    FakeLayer,
    FakeNet,
    FakeSolver,
    bits,
    blob,
    draw,
    make_solver,
)
from tests.on_ranks import all_raise, on_ranks, same_everywhere
from tests.python.caffe import caffe_nets


@all_raise(
    MismatchError,
    what={
        "none": None,
        "type": r"the solver to train: .*'type of solver' FakeSolver on rank 0, but .*NesterovSolver",
        "momentum": r"the solver to train: .*'momentum' 0.5 on rank 0, but 'momentum' 0.9 on rank 1",
        "base_lr": r"at step 8: .*'base_lr' 0.1 on rank 0, but 'base_lr' 0.01 on rank 1",
        "iteration": r"gradients\[",
    },
)
def test_solvers_that_differ(comm: Communicator, what: str) -> None:
    solver = make_solver()
    if what == "type" and comm.rank == 1:
        solver.__class__ = type("NesterovSolver", (FakeSolver,), {})
    momentum = 0.9 if what == "momentum" and comm.rank == 1 else 0.5
    # As Boost.Python shows the parameters: some of them, and another class.
    solver.param = SimpleNamespace(base_lr=0.1, stepvalue=iter([10, 20]), momentum=momentum)  # type: ignore[attr-defined]
    callback = multiring.caffe.SolverCallback(solver, comm, check_every=4)
    solver.add_callback(*callback)
    for step in range(9):
        if what == "base_lr" and comm.rank == 1 and step == 5:
            solver.param.base_lr = 0.01  # type: ignore[attr-defined]
        if what == "iteration" and comm.rank == 0 and step == 5:
            solver.iter = 2
        solver.param.stepvalue = [10, 20]  # type: ignore[attr-defined]
        solver.step([draw(step)])
        assert what in ("iteration", "none") or step < 7


@all_raise(MismatchError, "'type' SGD on rank 0, but 'type' Nesterov on rank 1")
def test_solver_types_of_a_prototxt_that_differ(comm: Communicator) -> None:
    with tempfile.TemporaryDirectory() as name:
        kind = "SGD" if comm.rank == 0 else "Nesterov"
        solver = caffe_nets.make_solver(Path(name), f'momentum: 0.9 type: "{kind}"')
    solver.add_callback(*multiring.caffe.SolverCallback(solver, comm))
    solver.step(1)


def test_broadcast_takes_the_history_along(comm: Communicator) -> None:
    """Rank 0 has trained on with other weights for a while, so its history is another one; broadcast() gives
    all ranks both."""
    with tempfile.TemporaryDirectory() as name:
        solver = caffe_nets.make_solver(Path(name), "momentum: 0.9 weight_decay: 0.1")
    callback = multiring.caffe.SolverCallback(solver, comm)
    solver.add_callback(*callback)
    solver.step(2)
    if comm.rank == 0:
        solver.net.params["ip1"][0].data[...] += 1
    solver.step(2)
    assert not same_everywhere(comm, [one.tobytes() for one in solver.history])
    callback.broadcast()
    assert same_everywhere(comm, [one.tobytes() for one in solver.history])
    solver.step(4)
    assert same_everywhere(comm, bits(solver.net))
    if comm.rank == 0:
        solver.iter = 100
    with pytest.raises(MismatchError, match="'iteration' 100 on rank 0, but 'iteration' 8 on rank 1"):
        callback.broadcast()
    callback.close()


@all_raise(MismatchError, r"at step 7: .*'conv\[0\]' float32 .* on rank 0, but")
def test_histories_that_differ_are_found_after_broadcast(comm: Communicator) -> None:
    """As pycaffe does. Weights are equal after broadcast(), and differ after the next update."""
    solver = make_solver()
    solver.momentum = 0.9
    callback = multiring.caffe.SolverCallback(solver, comm)
    solver.add_callback(*callback)
    for step in range(8):
        if step == 5:
            callback.broadcast()
            assert same_everywhere(comm, bits(solver.net))
            for history in solver._history.values() if comm.rank == 1 else ():
                history[...] += 1
        assert step < 7
        solver.step([draw(step)])


@all_raise(MismatchError, root_only={False: None, True: ""})
def test_a_snapshot_of_the_iteration_before(comm: Communicator, root_only: bool) -> None:
    """A snapshot of the iteration before is restored."""
    with tempfile.TemporaryDirectory() as name:
        solver = caffe_nets.make_solver(Path(name), "momentum: 0.9")
        solver.is_root = True  # each takes a snapshot of its own
        solver.add_callback(*multiring.caffe.SolverCallback(solver, comm))
        solver.step(3)
        snapshot = solver.snapshot()
        solver.step(1)
        if comm.rank == 0 or not root_only:
            solver.restore(snapshot)
        solver.step(4)
        assert not root_only
    assert same_everywhere(comm, bits(solver.net))


@on_ranks(3)
@pytest.mark.parametrize("mode", ["broadcast", "average", "local"])
def test_statistics_of_batch_normalisation(comm: Communicator, mode: Any) -> None:
    solver = make_solver()
    callback = multiring.caffe.SolverCallback(solver, comm, buffers=mode)
    solver.add_callback(*callback)
    norm = solver.net.params["norm"]
    for step in range(4):
        solver.net.clear_param_diffs()
        solver.start()
        for number, one in enumerate(norm):  # what a forward pass does
            one.data[...] = 10 * step + 3 * number + comm.rank
        solver.net.backward(draw(step))
        solver.gradients_ready()
        wanted = {"broadcast": 0.0, "average": (comm.size - 1) / 2, "local": comm.rank}[mode]
        assert all((one.data == 10 * step + 3 * n + wanted).all() for n, one in enumerate(norm))
        solver.apply_update()
    with callback.join():
        for step in range(3 * (comm.rank + 1)):  # the last rank goes on alone
            for one in norm:
                one.data[...] = 100 + 10 * step + comm.rank
            solver.step([draw(step)])
    assert all((one.data == 100 + 10 * (3 * comm.size - 1) + comm.size - 1).all() for one in norm)
    callback.close()


def test_scale_and_bias_of_a_batch_norm_layer_learn(comm: Communicator) -> None:
    """NVIDIA's and Intel's builds: a BatchNorm layer may have a scale and a bias that learn."""
    norm = FakeLayer("BatchNorm", [blob(4), blob(4), blob(1), blob(4), blob(4)])
    solver = FakeSolver(FakeNet({"norm": norm, "loss": FakeLayer("Loss", [])}))
    callback = multiring.caffe.SolverCallback(solver, comm)
    solver.add_callback(*callback)
    zeros = [np.zeros(4), np.zeros(4), np.zeros(1)]
    solver.step([{"norm": [*zeros, np.full(4, comm.rank), np.full(4, 2 * comm.rank)]}])
    assert callback.produced == {"norm[3]", "norm[4]"}
    assert [one.diff.max() for one in norm.blobs] == [0, 0, 0, 0.5, 1]
    callback.close()
