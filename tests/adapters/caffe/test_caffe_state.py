"""The ranks' solvers stay the same: settings, histories, snapshots, statistics, uneven data; the example."""

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
    add_callback,
    bits,
    blob,
    draw,
    make_pair,
    make_solver,
)
from tests.adapters.test_examples import accuracy
from tests.on_ranks import all_raise, on_ranks, refuses, same_everywhere
from tests.python.caffe import caffe_nets
from tests.support import REPOSITORY


@all_raise(
    MismatchError,
    what={
        "none": None,
        "type": r"the solver to train: .*'type of solver' FakeSolver on rank 0, but .*NesterovSolver",
        "momentum": r"the solver to train: .*'momentum' 0.5 on rank 0, but 'momentum' 0.9 on rank 1",
        "base_lr": r"at step 8: .*'base_lr' 0.1 on rank 0, but 'base_lr' 0.01 on rank 1",
        "iteration": r"Call restore\(\) .* rank 0 asked for allgather 'gradients of iteration 2, "
        r"where 5 comes next'",
    },
)
def test_solvers_that_differ(comm: Communicator, what: str) -> None:
    solver = make_solver()
    if what == "type" and comm.rank == 1:
        solver.__class__ = type("NesterovSolver", (FakeSolver,), {})
    momentum = 0.9 if what == "momentum" and comm.rank == 1 else 0.5
    # As Boost.Python shows the parameters: some of them, and another class.
    solver.param = SimpleNamespace(base_lr=0.1, stepvalue=iter([10, 20]), momentum=momentum)  # type: ignore[attr-defined]
    add_callback(solver, comm, check_every=4)
    for step in range(9):
        if what == "base_lr" and comm.rank == 1 and step == 5:
            solver.param.base_lr = 0.01  # type: ignore[attr-defined]
        if what == "iteration" and comm.rank == 0 and step == 5:
            solver.iter = 2
        solver.param.stepvalue = [10, 20]  # type: ignore[attr-defined]
        solver.step([draw(step)])
        assert what in ("iteration", "none") or step < 7


def read_solver(*arguments: Any, **options: Any) -> Any:
    with tempfile.TemporaryDirectory() as name:
        return caffe_nets.make_solver(Path(name), *arguments, **options)


def test_broadcast_takes_the_history_along(comm: Communicator) -> None:
    """Rank 0 has trained on with other weights for a while, so its history is another one as well."""
    solver = read_solver("momentum: 0.9 weight_decay: 0.1")
    callback = add_callback(solver, comm)
    solver.step(2)
    if comm.rank == 0:
        solver.net.params["ip1"][0].data[...] += 1
    solver.step(1)
    assert not same_everywhere(comm, [one.tobytes() for one in solver.history])
    callback.broadcast()
    assert same_everywhere(comm, [one.tobytes() for one in solver.history])
    solver.step(4)
    assert same_everywhere(comm, bits(solver.net))
    if comm.rank == 0:
        solver.iter = 100
    refuses(MismatchError, "'iteration' 100 on rank 0, but 'iteration' 7 on rank 1", callback.broadcast)


@all_raise(MismatchError, r"at step 7: .*'conv\[0\]' float32 .* on rank 0, but")
def test_histories_that_differ_are_found_after_broadcast(comm: Communicator) -> None:
    """As pycaffe does. Weights are equal after broadcast(), and differ after the next update."""
    solver = make_solver()
    solver.momentum = 0.9
    callback = add_callback(solver, comm)
    for step in range(8):
        if step == 5:
            callback.broadcast()
            assert same_everywhere(comm, bits(solver.net))
            for history in solver._history.values() if comm.rank == 1 else ():
                history[...] += 1
        assert step < 7
        solver.step([draw(step)])


@on_ranks(3)
@all_raise(
    MismatchError,
    where={
        "everywhere": None,
        "root": r"Call restore\(\) with .* rank 0 asked for allgather 'gradients of iteration 3, "
        r"where 4 comes next'",
        "others": r"ranks 1, 2 asked for allgather 'gradients of iteration 3, where 4 comes next'",
    },
)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_snapshot_of_the_iteration_before(comm: Communicator, where: str, overlap: bool) -> None:
    """A snapshot of the iteration before is restored."""
    with tempfile.TemporaryDirectory() as name:
        solver = caffe_nets.make_solver(Path(name), "momentum: 0.9")
        solver.is_root = True  # each takes a snapshot of its own
        check_every = None if where == "everywhere" else 0
        add_callback(solver, comm, overlap=overlap, iter_size=1, check_every=check_every)
        solver.step(3)
        snapshot = solver.snapshot()
        solver.step(1)
        if where == "everywhere" or (where == "root") == (comm.rank == 0):
            solver.restore(snapshot)
        solver.step(4 if where == "everywhere" else 1)
        assert where == "everywhere"
    assert same_everywhere(comm, bits(solver.net))


@on_ranks(3)
@pytest.mark.parametrize("mode", ["broadcast", "average", "local"])
def test_statistics_of_batch_normalisation(comm: Communicator, mode: Any) -> None:
    solver, callback = make_pair(comm, buffers=mode)
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


def test_scale_and_bias_of_a_batch_norm_layer_learn(comm: Communicator) -> None:
    """In NVIDIA's and Intel's builds."""
    norm = FakeLayer("BatchNorm", [blob(4), blob(4), blob(1), blob(4), blob(4)])
    solver = FakeSolver(FakeNet({"norm": norm, "loss": FakeLayer("Loss", [])}))
    callback = add_callback(solver, comm)
    zeros = [np.zeros(4), np.zeros(4), np.zeros(1)]
    solver.step([{"norm": [*zeros, np.full(4, comm.rank), np.full(4, 2 * comm.rank)]}])
    assert callback.produced == {"norm[3]", "norm[4]"}
    assert [one.diff.max() for one in norm.blobs] == [0, 0, 0, 0.5, 1]


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
    callback = add_callback(solver, comm)

    def step(number: int) -> None:
        solver.reduce([draw(10 * number + comm.rank)])
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


@all_raise(
    MismatchError,
    policy={"fixed": None, "poly": r"'max_iter' .*3.* on rank 0, but 'max_iter' .*4.* on rank 1"},
)
def test_ranks_that_stop_at_iterations_of_their_own(comm: Communicator, policy: str) -> None:
    solver = read_solver(f'max_iter: {3 + comm.rank} lr_policy: "{policy}" power: 1 momentum: 0.9')
    callback = add_callback(solver, comm, check_every=1)
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
        net = caffe_nets.SMALL.replace("batch_size: 4", f"batch_size: {count}")
        solver = read_solver("momentum: 0.9", net, samples=count)
        solver.net.set_input_arrays(images[begin : begin + count], labels[begin : begin + count])
        solvers.append(solver)
    mine, alone = solvers
    callback = add_callback(mine, comm, overlap=True, iter_size=1, frozen=mine.net.frozen_layers())
    for _ in range(3):
        mine.net.blobs["loss"].diff[...] = multiring.caffe.batch_weight(counts[comm.rank], comm)
        for solver in solvers:
            solver.step(1)
    assert callback.produced == {"ip1[0]", "ip1[1]", "ip2[0]", "ip2[1]"}
    for one, other in zip(mine.net.learnable, alone.net.learnable, strict=True):
        np.testing.assert_allclose(one.blob.data, other.blob.data, rtol=1e-10, atol=1e-12)


WITH_PYCAFFE = f"""
import importlib.util, sys
from tests.adapters.caffe import pycaffe_stand_in

sys.modules["caffe"] = pycaffe_stand_in
spec = importlib.util.spec_from_file_location("example", {str(REPOSITORY / "examples/caffe_digits.py")!r})
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
assert example.SGDSolver is pycaffe_stand_in.SGDSolver
example.STEPS = 60
example.main()
"""


def test_the_example_runs_on_pycaffe() -> None:
    assert accuracy(WITH_PYCAFFE, 2, env={"PYTHONPATH": str(REPOSITORY)}) > 0.85
