"""What is particular to Caffe: shared weights, iter_size, overlap, nets that do not call back, failures,
and backward passes that are not those of an iteration."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np
import pytest

from multiring import Communicator
from multiring.caffe import SolverCallback
from multiring.errors import MismatchError, UsageError
from tests.adapters.caffe.support import (
    SMALL,
    FakeBlob,
    FakeLayer,
    FakeNet,
    FakeSolver,
    add_callback,
    bits,
    blob,
    draw,
    expect,
    make_pair,
    make_solver,
    reduce_and_check,
)
from tests.on_ranks import all_raise, on_ranks, refuses, same_everywhere

PRODUCED = {"conv[0]", "conv[1]", "twin_a", "empty"}


def reduce_some(comm: Communicator, overlap: bool, iter_size: int | None, count: int) -> list[bytes]:
    solver, callback = make_pair(comm, overlap=overlap, iter_size=iter_size, **SMALL)
    bits = []
    for step in range(3):
        passes = [[draw(1000 * step + 10 * rank + k) for k in range(count)] for rank in range(comm.size)]
        solver.net.params["norm"][0].diff[...] = comm.rank
        solver.reduce(passes[comm.rank])
        expect(solver.net, passes)
        assert callback.produced == PRODUCED
        bits += [b.diff.tobytes() for blobs in solver.net.params.values() for b in blobs]
        solver.update(0.1)
    callback.close()
    return bits


@on_ranks(1, 3)
def test_gradients_of_an_iteration(comm: Communicator) -> list[list[bytes]]:
    ways = [(False, None, 1), (True, 1, 1), (True, 3, 3), (True, None, 3), (False, None, 3)]
    return [reduce_some(comm, *way) for way in ways]


def test_layers_leave_during_the_last_pass(comm: Communicator) -> None:
    """Buckets leave while the last pass is still in lower layers, and no earlier; a shared weight waits."""
    solver, callback = make_pair(comm, overlap=True, **SMALL)
    sent: list[tuple[int, int]] = []

    def look(layer: int) -> None:
        reducer = callback._reducer
        sent.append((layer, sum(map(reducer.is_ready, range(len(reducer.specs))))))

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


def test_an_unexpected_number_of_passes(comm: Communicator) -> None:
    solver, _ = make_pair(comm, overlap=True, iter_size=2, **SMALL)
    solver.step([draw(0), draw(1)])
    told = r"'twin_a' received a gradient in backward pass 3 .* sent after pass 2; pass Solver"
    refuses(UsageError, told, solver.step, [draw(0), draw(1), draw(2)])
    # The iteration is lost, the callback is not; fewer passes than announced only overlap less.
    reduce_and_check(comm, solver)


@on_ranks(3)
def test_weights_are_broadcast_once(comm: Communicator) -> None:
    solver = make_solver()
    for blobs in solver.net.params.values():
        for one in blobs:
            one.data[...] = comm.rank + 1
    callback = add_callback(solver, comm, root=1)
    solver.start()
    assert all((b.data == 2).all() for blobs in solver.net.params.values() for b in blobs)
    solver.net.params["conv"][0].data[...] = comm.rank  # nothing is broadcast in later iterations
    solver.start()
    assert (solver.net.params["conv"][0].data == comm.rank).all()
    callback.broadcast(0)
    assert (solver.net.params["conv"][0].data == 0).all()


class QuietSolver:
    """An old one: parameters and nothing else."""

    def __init__(self, params: Mapping[str, list[FakeBlob]]) -> None:
        self.net = SimpleNamespace(params=params)
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
        SolverCallback(solver, comm, overlap=True)
    options = {"average": False, "postscale": 0.5, **SMALL}
    callback = SolverCallback(solver, comm, frozen=["fixed"], **options)
    on_start, on_gradients_ready = callback
    for step in range(2):
        on_start()
        for blobs in params.values():
            for number, one in enumerate(blobs):
                one.diff[...] = comm.rank + number + step
        on_gradients_ready()
        for number in range(3):
            wanted = 0.5 * sum(rank + number + step for rank in range(comm.size))
            blobs = [*params["large"][number : number + 1], params["odd"][number]]
            assert all((one.diff == wanted).all() for one in blobs)
        assert (params["fixed"][0].diff == comm.rank + step).all()
    assert callback.produced == {"large[0]", "large[1]", "odd[0]", "odd[1]", "odd[2]"}


def test_refused(comm: Communicator) -> None:
    solver = make_solver()
    nothing = FakeSolver(FakeNet({"data": FakeLayer("Input", [])}))
    integers = FakeSolver(FakeNet({"odd": FakeLayer("Odd", [blob(2, dtype=np.int32)])}))
    for made, options, told in (
        (solver, {"frozen": ["conf"]}, "frozen names 'conf', but no layer"),
        (solver, {"iter_size": 0}, "iter_size is 0"),
        (nothing, {}, "no parameters"),
        (integers, {}, "dtype int32 cannot be reduced"),
        (solver, {"buffers": "some"}, "buffers is 'some'"),
    ):
        refuses(UsageError, told, SolverCallback, made, comm, **options)
    callback = add_callback(solver, comm)
    with pytest.raises(UsageError, match="already, and gradients would be reduced twice; close"):
        SolverCallback(solver, comm)
    refuses(UsageError, "came before on_start", solver.gradients_ready)
    solver.step([draw(0)])
    before = solver.net.layers[1].blobs[1]
    solver.net.layers[1].blobs[1] = blob(5)
    refuses(UsageError, r"'conv\[1\]' has become float32 \(5,\), it was float32 \(4,\)", solver.step, [{}])
    solver.net.layers[1].blobs[1] = before
    callback.close()
    refuses(UsageError, "is closed; make another", solver.step, [draw(0)])


def test_a_solver_goes_on_with_another_callback(comm: Communicator) -> None:
    """A solver trains on with another callback; Caffe keeps the callables of the closed one."""
    solver = make_solver()
    other = make_solver()
    add_callback(other, comm)
    for step in range(3):
        callback = add_callback(solver, comm, overlap=True, iter_size=1, **SMALL)
        for _ in range(2):
            reduce_and_check(comm, solver, 100 * step)
            solver.apply_update()
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
    solver, callback = make_pair(comm, overlap=overlap, iter_size=1, **SMALL)
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
        assert callback.produced == PRODUCED


def test_an_iteration_that_fails_on_all_ranks(comm: Communicator) -> None:
    """An iteration that ends with an exception half-way leaves nothing behind."""
    solver, _ = make_pair(comm, overlap=True, iter_size=1, **SMALL)
    bad = draw(0)
    bad["conv"] = [np.zeros(7, np.float32)]
    refuses(ValueError, "broadcast", solver.step, [bad])
    reduce_and_check(comm, solver)


@pytest.mark.full
@pytest.mark.parametrize(("overlap", "iter_size", "count"), [(True, 1, 1), (True, None, 2), (False, None, 2)])
def test_backward_passes_outside_of_an_iteration(
    comm: Communicator, overlap: bool, iter_size: int | None, count: int
) -> None:
    """Rank 0 runs backward passes outside of iterations, to look at gradients."""
    solver, callback = make_pair(comm, overlap=overlap, iter_size=iter_size, **SMALL)
    for step in range(4):
        for number in range(step if comm.rank == 0 else 0):
            solver.net.backward(draw(7 + number), skip=("conv", "twin_a"))
        passes = [[draw(1000 * step + 10 * rank + k) for k in range(count)] for rank in range(comm.size)]
        solver.step(passes[comm.rank])
        expect(solver.net, passes)
        assert callback.produced == PRODUCED
    assert same_everywhere(comm, bits(solver.net))


@pytest.mark.full
def test_a_callback_that_was_not_added(comm: Communicator) -> None:
    solver = make_solver()
    callback = SolverCallback(solver, comm)
    solver.iter = 100  # a snapshot was restored
    solver.net.backward(draw(0))
    solver.net.backward(draw(0))
    solver.step([draw(0)])
    with pytest.raises(UsageError, match=r"trains without its SolverCallback.*call solver.add_callback"):
        solver.step([draw(0)])
    solver.add_callback(*callback)
    solver.step([draw(0)])
    solver.net.backward(draw(0))


@pytest.mark.full
@pytest.mark.parametrize("buckets", [{}, SMALL])
@all_raise(MismatchError)
def test_a_backward_pass_after_a_failed_iteration(comm: Communicator, buckets: dict[str, int]) -> None:
    """One rank looks at gradients then, which Caffe cannot tell from that iteration's own backward pass."""
    solver, _ = make_pair(comm, overlap=True, iter_size=1, **buckets)
    solver.step([draw(0)])
    solver.net.clear_param_diffs()
    solver.start()
    if comm.rank == 0:
        solver.net.backward(draw(1))
    for step in range(3):
        solver.step([draw(10 * step + comm.rank)])


@pytest.mark.full
@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_changed_before_they_are_reduced(comm: Communicator, overlap: bool) -> None:
    solver = make_solver()

    def double() -> None:
        solver.net.params["conv"][0].diff.reshape(-1)[-2] *= 2

    solver.add_callback(lambda: None, double)
    add_callback(solver, comm, overlap=overlap, iter_size=1, **SMALL)
    mine = [[draw(rank)] for rank in range(comm.size)]
    if overlap:
        refuses(UsageError, r"'conv\[0\]' was changed after it had been sent", solver.step, mine[comm.rank])
        return
    solver.step(mine[comm.rank])
    solver.net.params["conv"][0].diff.reshape(-1)[-2] /= 2
    expect(solver.net, mine)
