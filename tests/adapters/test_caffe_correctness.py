"""What could let the ranks of a Caffe training drift apart: each case is right, or an error."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import multiring.caffe
from multiring import Communicator
from multiring.errors import MismatchError, UsageError
from tests.adapters.caffe_support import (
    SMALL,
    FakeLayer,
    FakeNet,
    FakeSolver,
    blob,
    draw,
    expect,
    make_solver,
)
from tests.python import caffe_nets
from tests.rank_pool import RankPool

Pool = Callable[[int], RankPool]

NORMALISED = """
name: "normalised"
layer { name: "data" type: "MemoryData" top: "data" top: "label"
  memory_data_param { batch_size: 4 channels: 2 height: 3 width: 3 } }
layer { name: "norm" type: "BatchNorm" bottom: "data" top: "norm" }
layer { name: "ip" type: "InnerProduct" bottom: "norm" top: "ip"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


def bits(net: Any) -> list[bytes]:
    return [one.data.tobytes() for blobs in net.params.values() for one in blobs]


def same_everywhere(comm: Communicator, values: object) -> bool:
    return comm.allgather_object(values) == [values] * comm.size


def look_on_one_rank(comm: Communicator, overlap: bool, iter_size: int | None, count: int) -> None:
    """Rank 0 runs backward passes outside of iterations, to look at gradients."""
    solver = make_solver()
    callback = multiring.caffe.SolverCallback(solver, comm, overlap=overlap, iter_size=iter_size, **SMALL)
    solver.add_callback(*callback)
    for step in range(4):
        for number in range(step if comm.rank == 0 else 0):
            solver.net.backward(draw(7 + number), skip=("conv", "twin_a"))
        passes = [[draw(1000 * step + 10 * rank + k) for k in range(count)] for rank in range(comm.size)]
        solver.step(passes[comm.rank])
        expect(solver.net, passes)
        assert callback.produced == {"conv[0]", "conv[1]", "twin_a", "empty"}
    assert same_everywhere(comm, bits(solver.net))
    callback.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("iter_size", "count"), [(1, 1), (None, 1), (None, 2)])
def test_backward_passes_outside_of_an_iteration(
    ranks: Pool, overlap: bool, iter_size: int | None, count: int
) -> None:
    ranks(2).run(look_on_one_rank, overlap, iter_size, count)


def look_at_gradients(comm: Communicator) -> None:
    """The same with whole passes of the solver in models: as without them, bit for bit."""
    found = []
    for looks in (False, True):
        with tempfile.TemporaryDirectory() as name:
            solver = caffe_nets.make_solver(Path(name), "momentum: 0.9")
        callback = multiring.caffe.SolverCallback(solver, comm, overlap=True, iter_size=1, bucket_bytes=64)
        solver.add_callback(*callback)
        for step in (2, 0, 1, 3):
            solver.step(step)
            if looks and comm.rank == 0:
                for _ in range(3):  # once through the data: training goes on with the batch that it would
                    solver.net.forward()
                    solver.net.backward()
        found.append(bits(solver.net))
        callback.close()
    assert found[0] == found[1]
    assert same_everywhere(comm, found)


def test_whole_passes_outside_of_an_iteration(ranks: Pool) -> None:
    ranks(2).run(look_at_gradients)


def train_apart(comm: Communicator, what: str) -> None:
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
        if what == "weights" and comm.rank == 0 and step == 5:
            solver.net.params["twin_b"][0].data[...] += 1
        if what == "iteration" and comm.rank == 0 and step == 5:
            solver.iter = 2
        solver.param.stepvalue = [10, 20]  # type: ignore[attr-defined]
        solver.step([draw(step)])
        assert what in ("iteration", "none") or step < 7


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("type", r"the solver to train: .*'type of solver' FakeSolver on rank 0, but .*NesterovSolver"),
        ("momentum", r"the solver to train: .*'momentum' 0.5 on rank 0, but 'momentum' 0.9 on rank 1"),
        ("base_lr", r"at step 8: .*'base_lr' 0.1 on rank 0, but 'base_lr' 0.01 on rank 1"),
        ("weights", r"at step 8: .*'twin_a' float32 .* on rank 0, but 'twin_a' float32 .* on rank 1"),
        ("iteration", r"gradients\["),
    ],
)
def test_solvers_that_differ(ranks: Pool, what: str, text: str) -> None:
    for error in ranks(2).run_expecting_errors(train_apart, what):
        assert isinstance(error, MismatchError), error
        assert re.search(text, str(error)), error


def test_solvers_that_do_not_differ(ranks: Pool) -> None:
    ranks(2).run(train_apart, "none")


def solver_types(comm: Communicator) -> None:
    with tempfile.TemporaryDirectory() as name:
        kind = "SGD" if comm.rank == 0 else "Nesterov"
        solver = caffe_nets.make_solver(Path(name), f'momentum: 0.9 type: "{kind}"')
    solver.add_callback(*multiring.caffe.SolverCallback(solver, comm))
    solver.step(1)


def test_solver_types_of_a_prototxt_that_differ(ranks: Pool) -> None:
    for error in ranks(2).run_expecting_errors(solver_types):
        assert isinstance(error, MismatchError), error
        assert "'type' SGD on rank 0, but 'type' Nesterov on rank 1" in str(error)


def hand_over(comm: Communicator) -> None:
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


def test_broadcast_takes_the_history_along(ranks: Pool) -> None:
    ranks(2).run(hand_over)


def hide_the_history(comm: Communicator) -> None:
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


def test_histories_that_differ_are_found_after_broadcast(ranks: Pool) -> None:
    for error in ranks(2).run_expecting_errors(hide_the_history):
        assert isinstance(error, MismatchError), error
        assert re.search(r"at step 7: .*'conv\[0\]' float32 .* on rank 0, but", str(error)), error


def synchronise_statistics(comm: Communicator, mode: Any) -> None:
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


@pytest.mark.parametrize("mode", ["broadcast", "average", "local"])
def test_statistics_of_batch_normalisation(ranks: Pool, mode: str) -> None:
    ranks(3).run(synchronise_statistics, mode)


def normalise(comm: Communicator) -> None:
    """The statistics are those of rank 0, as if it alone had kept them; or averages of what all kept."""
    found = {}
    for mode in ("local", "broadcast", "average"):
        with tempfile.TemporaryDirectory() as name:
            solver = caffe_nets.make_solver(Path(name), net=NORMALISED)
        images = np.random.default_rng(comm.rank).standard_normal((12, 2, 3, 3)) + comm.rank
        solver.net.set_input_arrays(images, np.arange(12.0) % 3)
        callback = multiring.caffe.SolverCallback(solver, comm, buffers=mode)  # type: ignore[arg-type]
        solver.add_callback(*callback)
        solver.step(5)
        found[mode] = [one.data.copy() for one in solver.net.params["norm"]]
        callback.close()
    every = comm.allgather_object(found["local"])
    assert [one.tobytes() for one in found["broadcast"]] == [one.tobytes() for one in every[0]]
    for one, own in zip(found["average"], zip(*every, strict=True), strict=True):
        np.testing.assert_allclose(one, np.mean(own, axis=0), rtol=1e-12)
    assert same_everywhere(comm, [one.tobytes() for one in found["average"]])
    assert not same_everywhere(comm, [one.tobytes() for one in found["local"]])


def test_statistics_of_the_solver(ranks: Pool) -> None:
    ranks(2).run(normalise)


def learn_scale_and_bias(comm: Communicator) -> None:
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


def test_scale_and_bias_of_a_batch_norm_layer_learn(ranks: Pool) -> None:
    ranks(2).run(learn_scale_and_bias)


def change_what_has_left(comm: Communicator, overlap: bool) -> None:
    solver = make_solver()

    def double() -> None:
        for one in solver.net.params["conv"]:
            one.diff[...] *= 2

    solver.add_callback(lambda: None, double)
    callback = multiring.caffe.SolverCallback(solver, comm, overlap=overlap, iter_size=1, **SMALL)
    solver.add_callback(*callback)
    mine = [[draw(rank)] for rank in range(comm.size)]
    if overlap:
        with pytest.raises(UsageError, match=r"'conv\[0\]' was changed after it had been sent"):
            solver.step(mine[comm.rank])
    else:
        solver.step(mine[comm.rank])
        for one in solver.net.params["conv"]:
            one.diff[...] /= 2
        expect(solver.net, mine)
    callback.close()


def change_one_value(comm: Communicator) -> None:
    solver = make_solver()
    callback = multiring.caffe.SolverCallback(solver, comm, overlap=True, iter_size=1, **SMALL)

    def mask() -> None:
        solver.net.params["conv"][0].diff.reshape(-1)[-2] = 0

    solver.add_callback(lambda: None, mask)
    solver.add_callback(*callback)
    with pytest.raises(UsageError, match=r"'conv\[0\]' was changed after it had been sent"):
        solver.step([draw(comm.rank)])
    callback.close()


def test_one_value_changed_before_it_is_reduced(ranks: Pool) -> None:
    ranks(2).run(change_one_value)


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_changed_before_they_are_reduced(ranks: Pool, overlap: bool) -> None:
    ranks(2).run(change_what_has_left, overlap)


def not_started(comm: Communicator) -> None:
    solver = make_solver()
    _, on_gradients_ready = multiring.caffe.SolverCallback(solver, comm)
    with pytest.raises(UsageError, match="came before on_start"):
        on_gradients_ready()
    with pytest.raises(UsageError, match="buffers is 'some'"):
        multiring.caffe.SolverCallback(make_solver(), comm, buffers="some")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="already, and gradients would be reduced twice; close"):
        multiring.caffe.SolverCallback(solver, comm)


def test_refused(ranks: Pool) -> None:
    ranks(2).run(not_started)


def go_back(comm: Communicator, root_only: bool) -> None:
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


def test_a_snapshot_of_the_iteration_before(ranks: Pool) -> None:
    ranks(2).run(go_back, False)
    for error in ranks(2).run_expecting_errors(go_back, True):
        assert isinstance(error, MismatchError), error


class OldSolver(FakeSolver):
    """Of before 2017."""

    @property
    def apply_update(self) -> Any:
        raise AttributeError("apply_update")


def not_added(comm: Communicator) -> None:
    solver = make_solver()
    callback = multiring.caffe.SolverCallback(solver, comm)
    solver.iter = 100  # a snapshot was restored
    solver.net.backward(draw(0))
    solver.net.backward(draw(0))
    solver.step([draw(0)])
    with pytest.raises(UsageError, match=r"trains without its SolverCallback.*call solver.add_callback"):
        solver.step([draw(0)])
    solver.add_callback(*callback)
    solver.step([draw(0)])
    solver.net.backward(draw(0))
    callback.close()


def test_a_callback_that_was_not_added(ranks: Pool) -> None:
    ranks(2).run(not_added)


def fail_and_look(comm: Communicator, buckets: dict[str, int]) -> None:
    """All ranks skip an iteration that fails; one looks at gradients before it goes on, which Caffe cannot
    tell from that iteration's own backward pass."""
    solver = make_solver()
    callback = multiring.caffe.SolverCallback(solver, comm, overlap=True, iter_size=1, **buckets)
    solver.add_callback(*callback)
    solver.step([draw(0)])
    solver.net.clear_param_diffs()
    solver.start()
    if comm.rank == 0:
        solver.net.backward(draw(1))
    for step in range(3):
        solver.step([draw(10 * step + comm.rank)])


@pytest.mark.parametrize("buckets", [{}, SMALL])
def test_a_backward_pass_after_a_failed_iteration(ranks: Pool, buckets: dict[str, int]) -> None:
    for error in ranks(2).run_expecting_errors(fail_and_look, buckets):
        assert isinstance(error, MismatchError), error


def uneven(comm: Communicator, updates: bool) -> None:
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


def test_uneven_data_with_momentum(ranks: Pool) -> None:
    ranks(3).run(uneven, True)
    for error in ranks(3).run_expecting_errors(uneven, False):
        assert isinstance(error, MismatchError), error
        assert "'iteration' 0.0 on rank 0, but 'iteration' 2.0 on rank 1" in str(error)


def stop_apart(comm: Communicator, policy: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        text = f'max_iter: {3 + comm.rank} lr_policy: "{policy}" power: 1 momentum: 0.9'
        solver = caffe_nets.make_solver(Path(name), text)
    callback = multiring.caffe.SolverCallback(solver, comm, check_every=1)
    solver.add_callback(*callback)
    with callback.join():
        solver.step(solver.param.max_iter)
    solver.step(2)
    assert same_everywhere(comm, bits(solver.net))


def test_ranks_that_stop_at_iterations_of_their_own(ranks: Pool) -> None:
    ranks(2).run(stop_apart, "fixed")
    for error in ranks(2).run_expecting_errors(stop_apart, "poly"):
        assert isinstance(error, MismatchError), error
        assert re.search(r"'max_iter' .*3.* on rank 0, but 'max_iter' .*4.* on rank 1", str(error)), error


def unequal_batches(comm: Communicator) -> None:
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


def test_batches_that_differ_in_size(ranks: Pool) -> None:
    ranks(3).run(unequal_batches)
