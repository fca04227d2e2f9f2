"""Train a small net on digits: an ordinary pycaffe script, with five lines for many processes.

    multiring run -np 2 python examples/caffe_digits.py

The lines that multiring needs are numbered; without a launcher the same script trains in one process. It runs
on pycaffe where there is one, and on the Caffe-style solver elsewhere.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import multiring  # 1
import multiring.caffe

try:
    from caffe import SGDSolver
except ImportError:
    from multiring.models.caffe import SGDSolver

BATCH = 64  # images per step over all ranks
STEPS = 400

NET = """
name: "digits"
layer { name: "data" type: "MemoryData" top: "data" top: "label"
  memory_data_param { batch_size: %d channels: 1 height: 8 width: 8 } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 16 kernel_size: 3 pad: 1 weight_filler { type: "msra" } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "pool" type: "Pooling" bottom: "conv" top: "pool"
  pooling_param { pool: MAX kernel_size: 2 stride: 2 } }
layer { name: "hidden" type: "InnerProduct" bottom: "pool" top: "hidden"
  inner_product_param { num_output: 64 weight_filler { type: "msra" } } }
layer { name: "hidden_relu" type: "ReLU" bottom: "hidden" top: "hidden" }
layer { name: "scores" type: "InnerProduct" bottom: "hidden" top: "scores"
  inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "scores" bottom: "label" top: "loss" }
layer { name: "accuracy" type: "Accuracy" bottom: "scores" bottom: "label" top: "accuracy"
  include { phase: TEST } }
"""

SOLVER = """
net: "%s"
type: "SGD" base_lr: 0.05 lr_policy: "step" gamma: 0.1 stepsize: 300 momentum: 0.9 weight_decay: 0.0005
test_iter: 1 test_interval: 1000 test_initialization: false max_iter: %d
snapshot_after_train: false solver_mode: CPU
"""


def load() -> tuple[np.ndarray, np.ndarray]:
    """Images of shape (n, 1, 8, 8) and labels, the same on every rank."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = digits.images[order, None].astype(np.float32) / 16 - 0.5
    return images, digits.target[order].astype(np.float32)


def make_solver(batch: int) -> SGDSolver:
    with tempfile.TemporaryDirectory() as directory:
        net, solver = Path(directory) / "net.prototxt", Path(directory) / "solver.prototxt"
        net.write_text(NET % batch)
        solver.write_text(SOLVER % (net, STEPS))
        return SGDSolver(str(solver))


def main() -> None:
    comm = multiring.init()  # 2
    images, labels = load()
    batch = BATCH // comm.size  # 3: this rank's share of each step
    solver = make_solver(batch)
    callback = multiring.caffe.SolverCallback(solver, overlap=True)  # 4
    solver.add_callback(*callback)  # 5: weights come from rank 0, gradients are averages over ranks
    share = np.arange(1472 - 1472 % (comm.size * batch)).reshape(-1, comm.size, batch)[:, comm.rank].ravel()
    net = solver.net  # kept: Caffe's own net reads the arrays where this object keeps them
    net.set_input_arrays(images[share], labels[share])
    solver.step(STEPS)
    test = np.arange(1472, len(labels))[comm.rank :: comm.size]
    test = test[: len(test) // batch * batch]
    test_net = solver.test_nets[0]
    test_net.share_with(net)
    test_net.set_input_arrays(images[test], labels[test])
    found = [float(test_net.forward()["accuracy"]) for _ in range(len(test) // batch)]
    metrics = multiring.caffe.average_metrics({"accuracy": np.mean(found)}, len(test))
    if comm.rank == 0:
        print(f"{comm.size} ranks, test accuracy {metrics['accuracy']:.4f}")


if __name__ == "__main__":
    main()
