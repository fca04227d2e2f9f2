"""What is particular to Caffe: shared weights, iter_size, statistics, overlap, nets that do not call back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import multiring.caffe
from multiring import Communicator, TopK
from multiring.errors import MismatchError, UsageError
from tests.adapters.caffe.support import (
    SMALL,
    FakeBlob,
    FakeLayer,
    FakeNet,
    FakeSolver,
    blob,
    draw,
    expect,
    make_solver,
    run_and_check,
)
from tests.on_ranks import all_raise, on_ranks

Array = NDArray[Any]


def reduce_some(
    comm: Communicator, overlap: bool, iter_size: int | None, count: int, **options: Any
) -> list[bytes]:
    solver = make_solver()
    options = {"overlap": overlap, "iter_size": iter_size, **SMALL, **options}
    callback = multiring.caffe.SolverCallback(solver, comm, **options)
    solver.add_callback(*callback)
    bits = []
    for step in range(3):
        passes = [[draw(1000 * step + 10 * rank + k) for k in range(count)] for rank in range(comm.size)]
        solver.net.params["norm"][0].diff[...] = comm.rank
        solver.net.clear_param_diffs()
        solver.start()
        for gradients in passes[comm.rank]:
            solver.net.backward(gradients)
        solver.gradients_ready()
        expect(solver.net, passes)
        assert callback.produced == {"conv[0]", "conv[1]", "twin_a", "empty"}
        bits += [b.diff.tobytes() for blobs in solver.net.params.values() for b in blobs]
        solver.update(0.1)
    callback.close()
    return bits


@on_ranks(1, 3)
def test_gradients_of_an_iteration(comm: Communicator) -> list[list[bytes]]:
    ways = [(False, None, 1), (True, 1, 1), (True, 3, 3), (True, None, 3), (False, None, 3)]
    return [reduce_some(comm, *way) for way in ways]


def test_a_compression_that_sends_everything(comm: Communicator) -> None:
    dense, compressed = (reduce_some(comm, True, 1, 1, compression=c) for c in (None, TopK(1.0)))
    assert dense == compressed


def test_layers_leave_during_the_last_pass(comm: Communicator) -> None:
    """Buckets leave while the last pass is still in lower layers, and no earlier; a shared weight waits."""
    solver = make_solver()
    callback = multiring.caffe.SolverCallback(solver, comm, overlap=True, **SMALL)
    solver.add_callback(*callback)
    sent: list[tuple[int, int]] = []

    def look(layer: int) -> None:
        current = callback._reducer._round
        sent.append((layer, 0 if current is None else sum(current.ready)))

    solver.net.after_backward(look)
    for step in range(3):
        sent.clear()
        solver.step([draw(step)] * 2)
        first_passes, last = sent[:7], dict(sent[7:])
        assert all(ready == 0 for _, ready in first_passes)
        if step == 0:  # nobody has said how many passes there are
            assert all(ready == 0 for ready in last.values())
        else:
            # twin_b is layer 5 and complete only with twin_a, layer 3; empty is layer 4, conv layer 1.
            assert [last[layer] for layer in (6, 5, 4, 3, 2, 1, 0)] == [0, 0, 1, 2, 2, 4, 4]
    callback.close()


def test_an_unexpected_number_of_passes(comm: Communicator) -> None:
    solver = make_solver()
    callback = multiring.caffe.SolverCallback(solver, comm, overlap=True, iter_size=2, **SMALL)
    solver.add_callback(*callback)
    solver.step([draw(0), draw(1)])
    with pytest.raises(
        UsageError, match=r"'twin_a' received a gradient in backward pass 3 .* sent after pass 2; pass Solver"
    ):
        solver.step([draw(0), draw(1), draw(2)])
    # The iteration is lost, the callback is not; fewer passes than announced only overlap less.
    run_and_check(comm, solver)
    callback.close()


@on_ranks(3)
def test_weights_are_broadcast_once(comm: Communicator) -> None:
    solver = make_solver()
    for blobs in solver.net.params.values():
        for one in blobs:
            one.data[...] = comm.rank + 1
    callback = multiring.caffe.SolverCallback(solver, comm, root=1)
    solver.add_callback(*callback)
    solver.start()
    assert all((b.data == 2).all() for blobs in solver.net.params.values() for b in blobs)
    solver.net.params["conv"][0].data[...] = comm.rank  # nothing is broadcast in later iterations
    solver.start()
    assert (solver.net.params["conv"][0].data == comm.rank).all()
    callback.broadcast(0)
    assert (solver.net.params["conv"][0].data == 0).all()
    callback.close()


@all_raise(MismatchError, "'iteration' 100 on rank 0, but 'iteration' 0 on rank 1")
def test_ranks_at_different_iterations_are_refused(comm: Communicator) -> None:
    solver = make_solver()
    solver.iter = 100 if comm.rank == 0 else 0
    solver.add_callback(*multiring.caffe.SolverCallback(solver, comm))
    solver.start()


class QuietNet:
    """An old net: parameters and nothing else."""

    def __init__(self, params: Mapping[str, list[FakeBlob]]) -> None:
        self.params = params


class QuietSolver:
    def __init__(self, params: Mapping[str, list[FakeBlob]]) -> None:
        self.net = QuietNet(params)
        self.iter = 0

    def add_callback(self, on_start: object, on_gradients_ready: object) -> None: ...


def test_a_net_that_does_not_call_back(comm: Communicator) -> None:
    params = {
        "large": [blob(300, 700), blob(70001, dtype=np.float64)],
        "odd": [blob(3, 5, order="F"), blob(7, dtype=np.float16), FakeBlob(np.zeros(9)[::2])],
        "fixed": [blob(2)],
    }
    solver = QuietSolver(params)
    with pytest.raises(UsageError, match="overlap=True needs a net with after_backward"):
        multiring.caffe.SolverCallback(solver, comm, overlap=True)
    callback = multiring.caffe.SolverCallback(
        solver, comm, frozen=["fixed"], average=False, postscale=0.5, **SMALL
    )
    on_start, on_gradients_ready = callback
    for step in range(2):
        on_start()
        for blobs in params.values():
            for number, one in enumerate(blobs):
                one.diff[...] = comm.rank + number + step
        on_gradients_ready()
        for number in range(3):
            wanted = 0.5 * sum(rank + number + step for rank in range(comm.size))
            for name in ("large", "odd"):
                assert all((one.diff == wanted).all() for one in params[name][number : number + 1])
        assert (params["fixed"][0].diff == comm.rank + step).all()
    assert callback.produced == {"large[0]", "large[1]", "odd[0]", "odd[1]", "odd[2]"}
    callback.close()


def test_refused(comm: Communicator) -> None:
    solver = make_solver()
    with pytest.raises(UsageError, match="frozen names 'conf', but no layer"):
        multiring.caffe.SolverCallback(solver, comm, frozen=["conf"])
    with pytest.raises(UsageError, match="iter_size is 0"):
        multiring.caffe.SolverCallback(solver, comm, iter_size=0)
    with pytest.raises(UsageError, match="no parameters"):
        multiring.caffe.SolverCallback(FakeSolver(FakeNet({"data": FakeLayer("Input", [])})), comm)
    with pytest.raises(UsageError, match="dtype int32 cannot be reduced"):
        odd = FakeNet({"odd": FakeLayer("Odd", [blob(2, dtype=np.int32)])})
        multiring.caffe.SolverCallback(FakeSolver(odd), comm)
    callback = multiring.caffe.SolverCallback(solver, comm)
    solver.add_callback(*callback)
    solver.step([draw(0)])
    before = solver.net.layers[1].blobs[1]
    solver.net.layers[1].blobs[1] = blob(5)
    with pytest.raises(UsageError, match=r"'conv\[1\]' has become float32 \(5,\), it was float32 \(4,\)"):
        solver.step([{}])
    solver.net.layers[1].blobs[1] = before
    callback.close()
    with pytest.raises(UsageError, match="is closed; make another"):
        solver.step([draw(0)])


def test_a_solver_goes_on_with_another_callback(comm: Communicator) -> None:
    """A solver trains on with another callback; Caffe keeps the callables of the closed one."""
    solver = make_solver()
    other = make_solver()
    other.add_callback(*multiring.caffe.SolverCallback(other, comm))
    for step in range(3):
        callback = multiring.caffe.SolverCallback(solver, comm, overlap=True, iter_size=1, **SMALL)
        solver.add_callback(*callback)
        for _ in range(2):
            mine = [[draw(100 * step + rank)] for rank in range(comm.size)]
            solver.step(mine[comm.rank])
            expect(solver.net, mine)
        callback.close()
        with pytest.raises(UsageError, match="is closed; make another"):  # the newest one, again
            solver.step([draw(0)])
        other.step([draw(0)])
    known = weakref.ref(solver)
    del solver, callback
    gc.collect()
    assert known() is None


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_that_were_filled_by_hand(comm: Communicator, overlap: bool) -> None:
    """Gradients that no backward pass has brought, on some ranks or on all."""
    solver = make_solver()
    callback = multiring.caffe.SolverCallback(solver, comm, overlap=overlap, iter_size=1, **SMALL)
    solver.add_callback(*callback)
    for hands in ([0, 1], [1], []):
        mine = [[draw(10 * len(hands) + rank)] for rank in range(comm.size)]
        solver.net.clear_param_diffs()
        solver.start()
        if comm.rank in hands:
            for name, gradients in mine[comm.rank][0].items():
                for one, gradient in zip(solver.net.params[name], gradients, strict=True):
                    one.diff[...] += gradient
        else:
            solver.net.backward(mine[comm.rank][0])
        solver.gradients_ready()
        expect(solver.net, mine)
        assert callback.produced == {"conv[0]", "conv[1]", "twin_a", "empty"}
    callback.close()
