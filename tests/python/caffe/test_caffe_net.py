"""Nets of the Caffe-style solver: what runs backward, which copies there are, and pycaffe's functions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from multiring.errors import UsageError
from multiring.models import caffe
from multiring.models.caffe import TEST, TRAIN, Net, PrototxtError, device, layer
from tests.python.caffe.caffe_nets import SMALL, make_net, make_solver

SCORES = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 3 dim: 4 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" param { lr_mult: 0 } param { lr_mult: 1 }
  propagate_down: false inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
layer { name: "prob" type: "Softmax" bottom: "ip" top: "prob" }
"""


def fill(net: Net) -> np.ndarray:
    data = np.random.default_rng(1).standard_normal((3, 4))
    net.blobs["data"].data[...] = data
    return data


@pytest.mark.parametrize("phase", [TRAIN, TEST])
def test_gradients_of_outputs_without_a_loss(tmp_path: Path, phase: int) -> None:
    net = make_net(tmp_path, "force_backward: true" + SCORES, phase)
    data = fill(net)
    given = np.random.default_rng(2).standard_normal((3, 5))
    prob = net.forward()["prob"].copy()
    found = net.backward(["ip"], prob=given)
    wanted = prob * (given - (given * prob).sum(1, keepdims=True))
    weight, bias = net.params["ip"]
    np.testing.assert_allclose(found["ip"], wanted, rtol=1e-12)
    np.testing.assert_allclose(found["data"], wanted @ weight.data, rtol=1e-12)
    np.testing.assert_allclose(weight.diff, wanted.T @ data, rtol=1e-12)
    np.testing.assert_allclose(bias.diff, wanted.sum(0), rtol=1e-12)
    assert net.frozen_layers() == []


def test_without_force_backward_only_a_loss_has_gradients(tmp_path: Path) -> None:
    net = make_net(tmp_path, SCORES)
    fill(net)
    net.forward()
    found = net.backward(prob=np.ones((3, 5)))
    assert not found["data"].any()
    assert not any(blob.diff.any() for blob in net.params["ip"])
    assert net.frozen_layers() == []
    with pytest.raises(UsageError, match=r"the outputs of the net are \['prob'\], not \['ip'\]"):
        net.backward(ip=np.ones((3, 5)))
    with pytest.raises(UsageError, match=r"blob 'prob' has shape \(3, 5\), its gradient \(2, 5\)"):
        net.backward(prob=np.ones((2, 5)))


def test_force_backward_fills_the_gradients_of_blobs_that_do_not_learn(tmp_path: Path) -> None:
    solver = make_solver(tmp_path, net=SMALL.replace('name: "small"', 'name: "small" force_backward: true'))
    learning = make_solver(tmp_path, net=SMALL.replace("lr_mult: 0", "lr_mult: 1"))
    before = solver.net.params["fixed"][0].data.copy()
    for one in (solver, learning):
        one.net.forward()
        one.net.backward()
    found, wanted = (one.net.params["fixed"][0].diff for one in (solver, learning))
    assert wanted.any()
    np.testing.assert_array_equal(found, wanted)
    solver.step(2)
    np.testing.assert_array_equal(solver.net.params["fixed"][0].data, before)


READER = 'layer { name: "half" type: "ReLU" bottom: "loss" top: "half" %s }'


@pytest.mark.parametrize(
    ("own", "of_reader", "layers", "loss", "gradient"),
    [
        ("", "loss_weight: 0.5", ["loss", "half"], 1.5, 0.5),  # the reader's gradient takes the place of 1
        ("", "", ["loss", "half"], 1.0, 0.0),  # the reader leads to no loss, so it hands nothing down
        ("", "loss_weight: 0.5 propagate_down: false", ["loss", "half"], 1.5, 0.0),
        ("loss_weight: 1", "loss_weight: 0.5", ["loss", "loss_loss_0_split", "half"], 1.5, 1.5),
        ("loss_weight: 1", "", ["loss", "loss_loss_0_split", "half"], 1.0, 1.0),
    ],
)
def test_a_layer_that_reads_the_loss(
    tmp_path: Path, own: str, of_reader: str, layers: list[str], loss: float, gradient: float
) -> None:
    alone = make_solver(tmp_path).net
    text = SMALL.replace('bottom: "label" top: "loss"', f'bottom: "label" top: "loss" {own}')
    net = make_solver(tmp_path, net=text + READER % of_reader).net
    net.reshape()
    assert net.blobs["label"].shape == (4, 1, 1, 1)
    assert net._layer_names[-len(layers) :] == layers
    for _ in range(2):
        for one in (alone, net):
            one.clear_param_diffs()
            one.forward()
            one.backward()
        assert net.loss == pytest.approx(loss * alone.loss, rel=1e-12)
        found, wanted = (one.params["ip2"][0].diff for one in (net, alone))
        np.testing.assert_allclose(found, gradient * wanted, rtol=1e-12)


def test_samples_in_batches(tmp_path: Path) -> None:
    net = make_net(tmp_path, SCORES)
    samples = np.random.default_rng(3).standard_normal((7, 4))
    found = net.forward_all(["ip"], data=samples)
    assert sorted(found) == ["ip", "prob"]
    weight, bias = (blob.data for blob in net.params["ip"])
    np.testing.assert_allclose(found["ip"], samples @ weight.T + bias, rtol=1e-12)
    np.testing.assert_allclose(found["prob"].sum(1), np.ones(7), rtol=1e-12)
    assert net.blobs["data"].shape == (3, 4)
    with pytest.raises(UsageError, match=r"the inputs of the net are \['data'\]"):
        net.forward_all(other=samples)
    with pytest.raises(UsageError, match="equally many samples"):
        net.forward_all(data=samples, other=samples[:3])
    loss = SCORES.replace('top: "data"', 'top: "data" top: "label"')
    loss = loss.replace("dim: 4 }", "dim: 4 } shape { dim: 3 }")
    loss += 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }'
    with pytest.raises(UsageError, match=r"blob 'loss' has shape \(\), not one entry for each of 3 samples"):
        make_net(tmp_path, loss).forward_all(data=samples, label=np.zeros(7))


def test_three_multipliers_of_batch_norm_become_zero(tmp_path: Path) -> None:
    text = 'layer { name: "n" type: "BatchNorm" bottom: "data" top: "n" %s }'
    data = 'layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 3 dim: 4 } } }\n'
    net = make_net(tmp_path, data + text % ("param { lr_mult: 1 } " * 3))
    assert [(one.lr_mult, one.decay_mult) for one in net.learnable] == [(0, 0)] * 3
    for count in (1, 2, 4):
        with pytest.raises(PrototxtError, match="statistics of BatchNorm cannot be learned"):
            make_net(tmp_path, data + text % ("param { lr_mult: 1 } " * count))


@pytest.fixture
def process() -> Iterator[None]:
    """Leaves the settings of the process as they were."""
    before = layer._generator, layer._shard, device._is_gpu
    yield
    layer._generator, layer._shard, device._is_gpu = before


@pytest.mark.usefixtures("process")
def test_a_random_seed_of_the_process(tmp_path: Path) -> None:
    def draw() -> list[bytes]:
        nets = [make_net(tmp_path, SCORES, seed=None) for _ in range(2)]
        nets.append(make_solver(tmp_path, "random_seed: -1").net)
        return [net.learnable[0].blob.data.tobytes() for net in nets]

    rows = []
    for seed in (1, 2, 1):
        caffe.set_random_seed(seed)
        rows.append(draw())
    assert rows[0] == rows[2]
    assert len({*rows[0][:2], *rows[1][:2]}) == 4
    assert rows[0][2] != rows[1][2]


@pytest.mark.usefixtures("process")
def test_the_rank_of_a_solver(tmp_path: Path) -> None:
    caffe.set_mode_cpu()
    caffe.set_solver_rank(1)
    with pytest.raises(UsageError, match="solver rank 1 of 1: call set_solver_count"):
        make_solver(tmp_path)
    caffe.set_solver_count(2)
    caffe.set_multiprocess(True)
    assert (caffe.solver_rank(), caffe.solver_count()) == (1, 2)
    solver = make_solver(tmp_path, "snapshot: 1")
    solver.step(1)
    assert not solver.is_root
    assert not list(tmp_path.glob("shot*"))
    assert solver.net._context.shard == (1, 2)
    for call, value in ((caffe.set_solver_count, 0), (caffe.set_solver_rank, -1)):
        with pytest.raises(UsageError):
            call(value)
