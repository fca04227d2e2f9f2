"""The Caffe-style solver: update rules, policies, order of an iteration, snapshots."""

# ruff: noqa: E501  # a layer of a prototxt reads best in one line

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from multiring.models.caffe import PrototxtError, Solver
from multiring.models.caffe.schema import NetParameter, SolverState
from multiring.models.errors import CheckpointError
from multiring.models.nets.resnet_caffe import digits_example
from tests.python.caffe.caffe_nets import SMALL, make_solver
from tests.support import REPOSITORY

Array = NDArray[Any]
ENDS = ("caffemodel", "solverstate")


def weights(solver: Solver) -> list[Array]:
    return [one.blob.data.copy() for one in solver.net.learnable]


def gradients(solver: Solver) -> list[Array]:
    """Of the next iteration, as they are before it."""
    net, passes = solver.net, solver.param.iter_size
    net.clear_param_diffs()
    for _ in range(passes):
        net.forward()
        net.backward()
    data: Any = net.layers[0]
    data._position = (data._position - 4 * passes) % 12
    return [one.blob.diff.copy() for one in net.learnable]


Rule = Callable[[list[Array], Array, float, int], Array]


def sgd(history: list[Array], gradient: Array, rate: float, iteration: int) -> Array:
    history[0] = 0.9 * history[0] + rate * gradient
    return history[0]


def nesterov(history: list[Array], gradient: Array, rate: float, iteration: int) -> Array:
    before = history[0]
    history[0] = 0.9 * before + rate * gradient
    return 1.9 * history[0] - 0.9 * before


def adam(history: list[Array], gradient: Array, rate: float, iteration: int) -> Array:
    history[0] = 0.9 * history[0] + 0.1 * gradient
    history[1] = 0.99 * history[1] + 0.01 * gradient**2
    correction = math.sqrt(1 - 0.99 ** (iteration + 1)) / (1 - 0.9 ** (iteration + 1))
    return rate * correction * history[0] / (np.sqrt(history[1]) + 1e-6)


def adagrad(history: list[Array], gradient: Array, rate: float, iteration: int) -> Array:
    history[0] = history[0] + gradient**2
    return rate * gradient / (np.sqrt(history[0]) + 1e-6)


def rmsprop(history: list[Array], gradient: Array, rate: float, iteration: int) -> Array:
    history[0] = 0.8 * history[0] + 0.2 * gradient**2
    return rate * gradient / (np.sqrt(history[0]) + 1e-6)


def adadelta(history: list[Array], gradient: Array, rate: float, iteration: int) -> Array:
    history[0] = 0.9 * history[0] + 0.1 * gradient**2
    step = gradient * np.sqrt((history[1] + 1e-6) / (history[0] + 1e-6))
    history[1] = 0.9 * history[1] + 0.1 * step**2
    return rate * step


@pytest.mark.parametrize(
    ("kind", "rule", "regularization", "more"),
    [
        ("SGD", sgd, "L2", "iter_size: 2"),
        ("Nesterov", nesterov, "L1", "clip_gradients: 0.5"),
        ("AdaGrad", adagrad, "L2", ""),
        ("RMSProp", rmsprop, "L2", "rms_decay: 0.8"),
        ("AdaDelta", adadelta, "L2", ""),
        ("Adam", adam, "L2", ""),
    ],
)
def test_update_rules(tmp_path: Path, kind: str, rule: Rule, regularization: str, more: str) -> None:
    solver = make_solver(
        tmp_path,
        f'type: "{kind}" momentum: {0.0 if kind in ("AdaGrad", "RMSProp") else 0.9} momentum2: 0.99 '
        f"delta: 1e-6 weight_decay: 0.01 {more} "
        f'regularization_type: "{regularization}" lr_policy: "exp" gamma: 0.5',
    )
    expected = weights(solver)
    history = [[np.zeros_like(value)] * 2 for value in expected]
    for iteration in range(4):
        found = gradients(solver)
        if "clip" in more:
            norm = math.sqrt(sum((g**2).sum() for g in found))
            assert norm > 0.5
            found = [g * 0.5 / norm for g in found]
        solver.step(1)
        for number, one in enumerate(solver.net.learnable):
            gradient = found[number] / (2 if "iter_size" in more else 1)
            decayed = expected[number] if regularization == "L2" else np.sign(expected[number])
            gradient = gradient + 0.01 * one.decay_mult * decayed
            if one.lr_mult:
                rate = 0.1 * 0.5**iteration * one.lr_mult
                expected[number] = expected[number] - rule(history[number], gradient, rate, iteration)
        for value, wanted in zip(weights(solver), expected, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-11, atol=1e-14)
    assert [one.lr_mult for one in solver.net.learnable] == [1, 2, 0, 1, 1]


POLICIES = {
    'lr_policy: "fixed"': lambda k: 0.1,
    'lr_policy: "step" gamma: 0.5 stepsize: 3': lambda k: 0.1 * 0.5 ** (k // 3),
    'lr_policy: "exp" gamma: 0.9': lambda k: 0.1 * 0.9**k,
    'lr_policy: "inv" gamma: 0.2 power: 0.75': lambda k: 0.1 * (1 + 0.2 * k) ** -0.75,
    'lr_policy: "poly" power: 2': lambda k: 0.1 * (1 - k / 10) ** 2,
    # Caffe takes one step an iteration.
    'lr_policy: "multistep" gamma: 0.5 stepvalue: 2 stepvalue: 2 stepvalue: 3 stepvalue: 7': lambda k: (
        0.1 * 0.5 ** ((k >= 2) + (k >= 3) + (k >= 4) + (k >= 7))
    ),
    'lr_policy: "sigmoid" gamma: 0.5 stepsize: 4': lambda k: 0.1 / (1 + math.exp(-0.5 * (k - 4))),
}


def test_learning_rate_policies(tmp_path: Path) -> None:
    for text, rate in POLICIES.items():
        solver = make_solver(tmp_path, text)
        for iteration in range(10):
            for _ in range(2):  # reading changes nothing
                assert solver.lr == pytest.approx(rate(iteration), rel=1e-12), text
            solver.step(1)


def test_the_order_of_an_iteration_is_caffes(tmp_path: Path) -> None:
    solver = make_solver(tmp_path, "iter_size: 2 test_iter: 1 test_interval: 2 snapshot: 2")
    seen: list[str] = []
    solver.test_nets[0].before_forward(lambda k: seen.append("test") if k == 0 else None)
    solver.net.before_forward(lambda k: seen.append("forward") if k == 0 else None)
    solver.net.after_backward(lambda k: seen.append(f"backward {k}"))

    def start() -> None:
        assert all(not one.blob.diff.any() for one in solver.net.learnable)
        seen.append(f"start {solver.iter}")

    solver.add_callback(start, lambda: seen.append(f"ready {solver.iter}"))
    solver.action = lambda: seen.append(f"shots {len(list(tmp_path.glob('*.solverstate')))}") or "none"  # type: ignore[func-returns-value]
    solver.step(2)
    one_pass = ["forward", *(f"backward {k}" for k in range(len(solver.net.layers) - 1, -1, -1))]
    first = ["test", "start 0", *one_pass, *one_pass, "ready 0", "shots 0"]
    assert seen == [*first, "start 1", *one_pass, *one_pass, "ready 1", "shots 0"]
    assert {path.name for path in tmp_path.glob("shot*")} == {f"shot_iter_2.{end}" for end in ENDS}


@pytest.mark.parametrize(("kind", "dtype"), [("SGD", "float32"), ("Adam", "float64")])
def test_a_restored_training_goes_on_bit_for_bit(tmp_path: Path, kind: str, dtype: str) -> None:
    text = f"""net: "digits.prototxt" type: "{kind}" momentum: 0.9 base_lr: 0.01 lr_policy: "multistep" gamma: 0.1
      stepvalue: 2 max_iter: 5 iter_size: 2 random_seed: 1 solver_mode: CPU snapshot_prefix: "{tmp_path}/shot" """
    net = SMALL[SMALL.index('layer { name: "ip1"') :].replace("ip2", "y")
    data = 'layer { name: "d" type: "Data" top: "data" top: "label" data_param { source: "digits" batch_size: 6 } }\n'
    norm = 'layer { name: "bn" type: "BatchNorm" bottom: "data" top: "data" }\n'
    (tmp_path / "digits.prototxt").write_text(data + norm + net.replace("num_output: 3", "num_output: 10"))
    (tmp_path / "solver.prototxt").write_text(text)
    whole = Solver(tmp_path / "solver.prototxt", dtype=dtype)
    whole.step(3)
    state = whole.snapshot()
    assert state == tmp_path / "shot_iter_3.solverstate"
    whole.step(2)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for end in ENDS:
        (tmp_path / f"shot_iter_3.{end}").rename(moved / f"shot_iter_3.{end}")
    other = Solver(tmp_path / "solver.prototxt", dtype=dtype)
    other.restore(moved / "shot_iter_3.solverstate")
    assert other.iter == 3
    other.step(2)
    for mine, theirs in zip(weights(other), weights(whole), strict=True):
        assert mine.tobytes() == theirs.tobytes()
    for one, two in zip(other.history, whole.history, strict=True):
        assert one.tobytes() == two.tobytes()
    assert not list(tmp_path.rglob(".shot*"))


def test_a_blob_that_no_longer_learns_stays_whatever_its_history_holds(tmp_path: Path) -> None:
    learning = make_solver(tmp_path, "momentum: 0.9", SMALL.replace("lr_mult: 0", "lr_mult: 1"))
    learning.step(2)
    path = learning.snapshot()
    assert path is not None
    solver = make_solver(tmp_path, "momentum: 0.9")
    solver.restore(path)
    before = weights(solver)
    frozen = [one.lr_mult for one in solver.net.learnable].index(0)
    assert solver.history[frozen].any()
    solver.step(2)
    same = [np.array_equal(*pair) for pair in zip(weights(solver), before, strict=True)]
    assert same == [number == frozen for number in range(len(same))]


def test_snapshots_are_caffes_messages(tmp_path: Path) -> None:
    solver = make_solver(tmp_path, 'momentum: 0.9 lr_policy: "multistep" gamma: 0.1 stepvalue: 1')
    solver.step(2)
    path = solver.snapshot()
    state = SolverState.FromString(path.read_bytes())
    assert (state.iter, state.current_step, len(state.history)) == (2, 1, 5)
    assert state.learned_net == str(path.with_suffix(".caffemodel"))
    net = NetParameter.FromString(path.with_suffix(".caffemodel").read_bytes())
    layer = next(layer for layer in net.layer if layer.name == "ip1")
    assert (layer.type, list(layer.blobs[0].shape.dim)) == ("InnerProduct", [5, 18])
    found = np.reshape(layer.blobs[0].double_data, (5, 18))
    np.testing.assert_array_equal(found, solver.net.params["ip1"][0].data)


def test_files_that_are_no_snapshots(tmp_path: Path) -> None:
    solver = make_solver(tmp_path)
    path = solver.snapshot()
    before = weights(solver)
    other = make_solver(tmp_path, 'type: "Adam"')
    with pytest.raises(CheckpointError, match="holds 5 arrays of history; this solver has 10"):
        other.restore(path)
    model = path.with_suffix(".caffemodel")
    model.write_bytes(model.read_bytes()[:200])
    with pytest.raises(CheckpointError, match=rf"{model} is damaged"):
        solver.restore(path)
    with pytest.raises(CheckpointError, match="cannot read .*nowhere"):
        solver.restore(tmp_path / "nowhere.solverstate")
    with pytest.raises(CheckpointError, match="HDF5"):
        solver.restore(tmp_path / "some.solverstate.h5")
    for mine, kept in zip(weights(solver), before, strict=True):
        np.testing.assert_array_equal(mine, kept)


def test_what_a_training_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "multiring.caffe")
    text = "display: 2 average_loss: 2 test_iter: 3 test_interval: 2 max_iter: 4 test_compute_loss: true"
    solver = make_solver(tmp_path, text)
    losses: list[float] = []
    solver.add_callback(lambda: None, lambda: losses.append(solver.net.loss))
    solver.solve()
    lines = [record.getMessage() for record in caplog.records]
    assert lines.count("Iteration 0, Testing net (#0)") == 1
    second = next(line for line in lines if line.startswith("Iteration 2 ("))
    assert second.endswith(f"s/2 iters), loss = {(losses[1] + losses[2]) / 2:g}")
    assert any(line.startswith("    Test net output #1: loss = ") and "(* 1 = " in line for line in lines)
    assert "Iteration 2, lr = 0.1" in lines
    assert (tmp_path / "shot_iter_4.solverstate").exists()


REFUSED = {
    'type: "LBFGS"': "solver type 'LBFGS' is not supported; choose one of SGD, Nesterov, AdaGrad, RMSProp, AdaDelta",
    'type: "AdaGrad" momentum: 0.9': "momentum cannot be used with AdaGrad",
    'type: "RMSProp" rms_decay: 1': "rms_decay has to be at least 0 and less than 1",
    "solver_type: ADAM": 'field solver_type of SolverParameter is not supported; write type: "Adam" instead',
    "solver_type: 3": 'field solver_type of SolverParameter is not supported; write type: "RMSProp" instead',
    "iter_step: 2": "field iter_step of SolverParameter is not supported; is iter_size meant",
    'lr_policy: "cosine"': "lr_policy 'cosine' is unknown",
    'lr_policy: "exp" gamma: -0.1': "lr_policy 'exp' needs a gamma of at least 0",
    'lr_policy: "sigmoid" gamma: 1 stepsize: 0': "stepsize has to be at least 1",
    'lr_policy: "step" gamma: 0.1': "lr_policy 'step' needs stepsize",
    "secret_decay: 0.9": "field secret_decay of SolverParameter is not supported",
    "snapshot_format: HDF5": "snapshot_format: HDF5 is not supported",
    "iter_size: 0": "iter_size and average_loss have to be at least 1",
    'net: "other.prototxt"': "net 'other.prototxt' is neither in the working directory nor beside",
    "test_iter: 1": "test nets need a test_interval",
    'snapshot_prefix: "/nowhere/at/all"': "cannot write snapshots to /nowhere/at",
}


def test_solvers_that_are_refused(tmp_path: Path) -> None:
    for text, told in REFUSED.items():
        with pytest.raises(PrototxtError, match=rf"solver.prototxt:\d+: {told}"):
            make_solver(tmp_path, text)


def test_the_examples_are_those_of_the_specification() -> None:
    for name, text in digits_example().items():
        assert (REPOSITORY / "examples" / "caffe" / name).read_text() == text
