"""A callback over the Caffe-style solver on a GPU, as far as a pretended one tells: the bits of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from multiring import Communicator
from multiring.models.caffe import Solver
from multiring.torch import batch_statistics
from tests.adapters.caffe.support import add_callback
from tests.on_ranks import on_ranks, same_everywhere
from tests.python.caffe.caffe_nets import Array
from tests.python.caffe.pretended_device import pretended_device

NET = """
layer { name: "d" type: "Data" top: "data" top: "label" data_param { source: "digits" batch_size: 6 } }
layer { name: "bn" type: "BatchNorm" bottom: "data" top: "data" }
layer { name: "a" type: "InnerProduct" bottom: "data" top: "a" param { name: "w" }
  inner_product_param { num_output: 10 bias_term: false weight_filler { type: "xavier" } } }
layer { name: "b" type: "InnerProduct" bottom: "data" top: "b" param { name: "w" }
  inner_product_param { num_output: 10 bias_term: false } }
layer { name: "r" type: "ReLU" bottom: "b" top: "b" }
layer { name: "c" type: "InnerProduct" bottom: "b" top: "c"
  inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
layer { name: "sum" type: "Eltwise" bottom: "a" bottom: "c" top: "sum" }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "sum" bottom: "label" top: "loss" }
"""
SOLVER = """net: "net.prototxt" base_lr: 0.05 lr_policy: "fixed" momentum: 0.9 max_iter: 20 iter_size: 2
random_seed: 3 clip_gradients: 1 test_iter: 1 test_interval: 2 """


def _train(comm: Communicator, path: Path, device: str, *, over_ranks: bool, **options: Any) -> list[Array]:
    """Weights that differ at first, a broadcast of weights and history, and ranks with more iterations."""
    shard = (comm.rank, comm.size)
    solver = Solver(path, device=device, shard=shard, sync_batch_norm_comm=comm if over_ranks else None)
    if comm.rank:
        solver.net.params["c"][0].data[...] = 9
    callback = add_callback(solver, comm, iter_size=2, check_every=2, **options)
    solver.step(3)
    if not comm.rank:
        solver.net.params["c"][1].data[...] += 1
        solver.history[0][...] = 0.5
    callback.broadcast()
    if over_ranks:
        solver.step(2)
    else:
        with callback.join():
            solver.step(2 + comm.rank)
    solver.step(2)
    found = [one.blob.data.copy() for one in solver.net.learnable]
    found += [array.copy() for array in solver.history]
    learned = [one.blob.data.tobytes() for one in solver.net.learnable if one.lr_mult]
    assert same_everywhere(comm, [solver.iter, *learned])
    callback.close()
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": True, "buffers": "average"},
        {"buffers": "local", "average": False},
        {"overlap": True, "over_ranks": True},
    ],
    ids=["plain", "overlap", "local", "over ranks"],
)
@on_ranks(2)
def test_bits_of_the_cpu(comm: Communicator, tmp_path: Path, options: dict[str, Any]) -> None:
    directory = tmp_path / str(comm.rank)
    directory.mkdir()
    (directory / "net.prototxt").write_text(NET)
    path = directory / "solver.prototxt"
    path.write_text(SOLVER + f'snapshot_prefix: "{directory}/shot"')
    options = {"over_ranks": False, **options}
    # Torch's kernels for a CPU round otherwise than the operations that devices have.
    with mock.patch.object(batch_statistics, "_has_kernels", return_value=False):
        expected = _train(comm, path, "cpu", **options)
        with pretended_device() as device:
            found = _train(comm, path, device, **options)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
