"""Small nets and solvers in Caffe's text formats, for the tests of the Caffe-style solver."""

# ruff: noqa: E501  # a layer of a prototxt reads best in one line

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.models.caffe import TRAIN, Net, Solver

Array = NDArray[Any]

INPUT = """force_backward: true
layer { name: "data" type: "Input" top: "data" top: "label"
  input_param { shape { dim: 3 dim: 4 dim: 7 dim: 6 } shape { dim: 3 } } }
"""
SMALL = """
name: "small"
layer { name: "data" type: "MemoryData" top: "data" top: "label"
  memory_data_param { batch_size: 4 channels: 2 height: 3 width: 3 } }
layer { name: "ip1" type: "InnerProduct" bottom: "data" top: "ip1" param { lr_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
  inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "ip1" top: "ip1" }
layer { name: "fixed" type: "Scale" bottom: "ip1" top: "ip1" param { lr_mult: 0 } scale_param { filler { value: 2 } } }
layer { name: "ip2" type: "InnerProduct" bottom: "ip1" top: "ip2"
  inner_product_param { num_output: 3 weight_filler { type: "gaussian" std: 0.5 } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip2" bottom: "label" top: "loss" }
layer { name: "accuracy" type: "Accuracy" bottom: "ip2" bottom: "label" top: "accuracy" include { phase: TEST } }
"""


def make_net(directory: Path, text: str, phase: int = TRAIN, **options: Any) -> Net:
    """A float64 net of a text."""
    path = directory / "net.prototxt"
    path.write_text(text)
    return Net(path, phase, **{"dtype": "float64", "seed": 0, **options})


def make_solver(directory: Path, text: str = "", net: str = SMALL, *, samples: int = 12) -> Solver:
    """A float64 solver of a small net, with data."""
    (directory / "net.prototxt").write_text(net)
    path = directory / "solver.prototxt"
    base = {"base_lr": "0.1", "lr_policy": '"fixed"', "max_iter": "10", "random_seed": "3"}
    base |= {"snapshot_prefix": f'"{directory}/shot"', "net": '"net.prototxt"', "solver_mode": "CPU"}
    lines = [f"{key}: {value}" for key, value in base.items() if f"{key}:" not in text]
    path.write_text("\n".join([*lines, text]))
    solver = Solver(path, dtype="float64")
    feed(solver.net, samples)
    for other in solver.test_nets:
        feed(other, samples)
    return solver


def feed(net: Net, samples: int) -> None:
    generator = np.random.default_rng(5)
    images = generator.standard_normal((samples, 2, 3, 3))
    net.set_input_arrays(images, generator.integers(0, 3, samples).astype(np.float64))


def check_gradients(net: Net, seed: int = 0) -> None:
    """Compare every learned blob's gradient, and those of the inputs, with differences of the loss."""
    generator = np.random.default_rng(seed)
    last = len(net.layers) - 1
    net.clear_param_diffs()
    net.forward()
    net.backward()
    pairs = [(one.name, one.blob.data, one.blob.diff.copy()) for one in net.learnable if one.lr_mult]
    pairs += [(n, net.blobs[n].data, net.blobs[n].diff.copy()) for n in net.inputs if n != "label"]
    assert pairs
    for name, values, gradient in pairs:
        flat = values.reshape(-1)
        for index in generator.choice(flat.size, min(4, flat.size), replace=False):
            before, step = flat[index], 1e-6
            losses = []
            for value in (before + step, before - step):
                flat[index] = value
                losses.append(net.forward_from_to(0, last))
            flat[index] = before
            wanted = (losses[0] - losses[1]) / (2 * step)
            np.testing.assert_allclose(
                gradient.reshape(-1)[index], wanted, rtol=1e-5, atol=1e-8, err_msg=f"{name}[{index}]"
            )
