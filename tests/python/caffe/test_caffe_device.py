"""A net on a GPU: the same layers in other memory, which a program sees on the host. On a device that is
pretended; tests/gpu has the real one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from multiring.errors import UsageError
from multiring.models import caffe
from multiring.models.caffe import TEST, TRAIN, Solver, device
from tests.python.caffe.caffe_nets import SMALL, Array, feed, make_net
from tests.python.caffe.pretended_device import pretended_device
from tests.python.caffe.test_caffe_layers import HEAD, INPUT, KINDS

DATA = """layer { name: "d" type: "Data" top: "data" top: "label"
  data_param { source: "digits" batch_size: 6 } }
layer { name: "bn" type: "BatchNorm" bottom: "data" top: "data" }
"""


def on_both(run: Callable[[str], list[Array]]) -> None:
    """Compares bit for bit what a net gives on the CPU and on the device."""
    expected = run("cpu")
    with pretended_device() as where:
        found = run(where)
    assert len(found) > 1
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype, one.tobytes()) == (other.shape, other.dtype, other.tobytes())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", [TRAIN, TEST])
def test_every_layer_computes_where_its_blobs_lie(tmp_path: Path, kind: str, phase: int) -> None:
    def run(where: str) -> list[Array]:
        net = make_net(tmp_path, INPUT + KINDS[kind] + HEAD, phase, device=where)
        net.blobs["data"].data[...] = np.random.default_rng(1).standard_normal((3, 4, 7, 6))
        net.blobs["label"].data[...] = [0, 2, 1]
        net.forward()
        net.backward()
        blobs = [*net.blobs.values(), *(one.blob for one in net.learnable)]
        return [np.array(array) for blob in blobs for array in (blob.data, blob.diff)]

    on_both(run)


@pytest.mark.parametrize("kind", ["SGD", "Nesterov", "Adam"])
def test_a_training_with_snapshots_and_a_program_that_looks_on(tmp_path: Path, kind: str) -> None:
    net = SMALL[SMALL.index('layer { name: "ip1"') :].replace("num_output: 3", "num_output: 10")
    (tmp_path / "net.prototxt").write_text(DATA + net)
    text = f"""net: "net.prototxt" type: "{kind}" momentum: 0.9 base_lr: 0.01 lr_policy: "fixed" max_iter: 5
      iter_size: 2 random_seed: 1 clip_gradients: 0.5 weight_decay: 0.01
      test_iter: 2 test_interval: 2 display: 2
      snapshot_prefix: "{tmp_path}/shot" """
    (tmp_path / "solver.prototxt").write_text(text)

    def run(where: str) -> list[Array]:
        solver = Solver(tmp_path / "solver.prototxt", device=where)
        solver.net.params["ip2"][0].data[...] *= 2
        solver.step(3)
        state = solver.snapshot()
        assert state is not None
        solver.net.params["ip1"][0].data[...] = 7
        solver.step(1)
        solver.restore(state)
        for array in solver.history:
            array += 0.001
        solver.net.params["bn"][2].data[...] += 1
        solver.step(2)
        tested = [value for outputs in solver.test_all() for value in outputs.values()]
        return [*(one.blob.data.copy() for one in solver.net.learnable), *solver.history, *tested]

    on_both(run)


@pytest.mark.parametrize("what", ["activations", "weights", "a copy of a Split"])
def test_what_a_program_writes_between_passes_counts(tmp_path: Path, what: str) -> None:
    """Though layers have kept what they have seen, and copies of a Split are one memory."""
    text = INPUT + KINDS["scale_all"] + HEAD
    if what == "a copy of a Split":
        text = text.replace("force_backward: true", "force_backward: true name: 's'").replace(
            'layer { name: "loss"',
            'layer { name: "also" type: "InnerProduct" bottom: "x" top: "also" inner_product_param '
            '{ num_output: 3 weight_filler { type: "xavier" } } }\n layer { name: "loss"',
        )

    def run(where: str) -> list[Array]:
        net = make_net(tmp_path, text, device=where)
        net.blobs["data"].data[...] = np.random.default_rng(1).standard_normal((3, 4, 7, 6))
        net.blobs["label"].data[...] = [0, 2, 1]
        net.forward()
        if what == "activations":
            net.blobs["x"].data[...] *= 0.5
        elif what == "weights":
            net.params["x"][0].data[...] = 3
        else:
            first, second = (net.blobs[f"x_x_0_split_{k}"] for k in (0, 1))
            _ = second.data, net.blobs["x"].data
            first.data[...] = 7
            net.forward(start="out")
            assert (second.data == 7).all()
        net.backward()
        return [np.array(one.blob.diff) for one in net.learnable] + [np.array(net.blobs["data"].diff)]

    on_both(run)


def test_shared_memory_and_arrays_of_the_program(tmp_path: Path) -> None:
    """Blobs that share memory have one state of it, however their shapes differ."""
    twins = """name: "twins" layer { name: "data" type: "MemoryData" top: "data" top: "label"
        memory_data_param { batch_size: 4 channels: 2 height: 3 width: 3 } }
      layer { name: "a" type: "InnerProduct" bottom: "data" top: "a" param { name: "w" }
        inner_product_param { num_output: 3 bias_term: false weight_filler { type: "xavier" } } }
      layer { name: "b" type: "InnerProduct" bottom: "data" top: "b"
        param { name: "w" share_mode: PERMISSIVE }
        inner_product_param { num_output: 3 bias_term: false transpose: true } }
      layer { name: "sum" type: "Eltwise" bottom: "a" bottom: "b" top: "sum" }
      layer { name: "loss" type: "SoftmaxWithLoss" bottom: "sum" bottom: "label" top: "loss" }"""

    def run(where: str) -> list[Array]:
        net = make_net(tmp_path, twins, device=where)
        feed(net, 12)
        net.forward()
        net.backward()
        found = [net.params["b"][0].diff.copy(), net.params["a"][0].data.copy()]
        net.params["b"][0].data[...] = 1
        found.append(net.params["a"][0].data.copy())
        net.params["a"][0].data[...] += np.arange(54).reshape(3, 18)
        net.forward()
        net.clear_param_diffs()
        net.backward()
        return [*found, *(net.params[name][0].data for name in "ab"), net.params["a"][0].diff]

    on_both(run)


@pytest.fixture
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """What computes, as a new process has it; left as it was."""
    monkeypatch.setattr(device, "_is_gpu", None)
    monkeypatch.setattr(device, "_ordinal", None)


@pytest.mark.usefixtures("nothing_said")
def test_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for call in (caffe.set_mode_gpu, lambda: caffe.set_device(0)):
        with pytest.raises(UsageError, match="Torch sees no GPU"):
            call()
    (tmp_path / "net.prototxt").write_text(SMALL)
    path = tmp_path / "solver.prototxt"
    path.write_text(
        f'net: "net.prototxt" base_lr: 1 lr_policy: "fixed" solver_mode: GPU snapshot_prefix: "{tmp_path}/s"'
    )
    caplog.set_level(logging.INFO, "multiring.caffe")
    assert Solver(path).net.gpu_stream is None
    assert "Torch sees none; computing on the CPU" in caplog.text


@pytest.mark.usefixtures("nothing_said")
def test_which_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the process, else by the prototxt; a number that is none of a GPU is told with its line."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    (tmp_path / "net.prototxt").write_text(SMALL)
    path = tmp_path / "solver.prototxt"

    def chosen(text: str) -> str:
        path.write_text(
            f'net: "net.prototxt" base_lr: 1 lr_policy: "fixed" {text}\nsnapshot_prefix: "{tmp_path}/s"'
        )
        monkeypatch.setattr(caffe.solver, "train_net", lambda param, location, context: context.device)
        monkeypatch.setattr(caffe.solver, "test_nets", lambda *_: [])
        monkeypatch.setattr(Solver, "make_rule", lambda self: None)
        return str(Solver(path).net)

    assert chosen("") == chosen("solver_mode: CPU") == "cpu"
    assert chosen("solver_mode: GPU") == "cuda:1"
    assert chosen("solver_mode: GPU device_id: 0") == "cuda:0"
    with pytest.raises(
        caffe.PrototxtError, match=r"solver.prototxt:1: there is no GPU 2: this process sees 2"
    ):
        chosen("solver_mode: GPU device_id: 2")
    caffe.set_mode_gpu()
    assert chosen("solver_mode: CPU") == "cuda:1"
    caffe.set_device(0)
    assert chosen("solver_mode: CPU") == "cuda:0"
    caffe.set_mode_cpu()
    assert chosen("solver_mode: GPU") == "cpu"
    with pytest.raises(UsageError, match="there is no GPU 2"):
        caffe.set_device(2)
