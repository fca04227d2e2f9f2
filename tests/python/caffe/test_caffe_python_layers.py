"""Layers that a program writes in Python, and databases of images as `convert_imageset` makes them."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from PIL import Image

from multiring.errors import UsageError
from multiring.models import caffe
from multiring.models.caffe import TEST, TRAIN, PrototxtError
from multiring.models.caffe.schema import message
from multiring.models.caffe.snapshots import BlobProto
from multiring.models.caffe.sources import open_source
from multiring.models.errors import CheckpointError, DataError
from tests.python.caffe.caffe_nets import make_net

MODULE = '''
import numpy as np
from multiring.models import caffe

class Affine(caffe.Layer):
    """a * x + b with a from the prototxt and a learned b."""

    def setup(self, bottom, top):
        self.factor = float(self.param_str)
        self.blobs.add_blob(bottom[0].channels).data[...] = 1.0

    def reshape(self, bottom, top):
        top[0].reshape(*bottom[0].shape)

    def forward(self, bottom, top):
        top[0].data[...] = self.factor * bottom[0].data + self.blobs[0].data

    def backward(self, top, propagate_down, bottom):
        self.blobs[0].diff[...] += top[0].diff.sum(0)
        if propagate_down[0]:
            bottom[0].diff[...] = self.factor * top[0].diff

class Distance(caffe.Layer):
    """A loss of two bottoms."""

    def reshape(self, bottom, top):
        top[0].reshape(1)

    def forward(self, bottom, top):
        self.difference = bottom[0].data - bottom[1].data
        top[0].data[...] = (self.difference ** 2).sum() / 2

    def backward(self, top, propagate_down, bottom):
        for k, sign in enumerate((1, -1)):
            if propagate_down[k]:
                bottom[k].diff[...] = sign * top[0].diff * self.difference

class Counting(caffe.Layer):
    """A source of data, whose batches grow."""

    count = 0

    def reshape(self, bottom, top):
        self.count += 1
        top[0].reshape(self.count, 2)
        top[1].reshape(self.count, 2)

    def forward(self, bottom, top):
        top[0].data[...] = self.phase + 1
        top[1].data[...] = 0

class Unfinished(caffe.Layer):
    pass

NOTHING = 3
'''

NET = """
layer { name: "data" type: "Input" top: "x" top: "wanted" input_param { shape { dim: 2 dim: 3 } } }
layer { name: "affine" type: "Python" bottom: "x" top: "y"
  python_param { module: "python_layers" layer: "Affine" param_str: "2.5" } }
layer { name: "loss" type: "Python" bottom: "y" bottom: "wanted" top: "loss" loss_weight: 1
  python_param { module: "python_layers" layer: "Distance" } }
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "python_layers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("python_layers", None)


def test_forward_and_backward(tmp_path: Path) -> None:
    net = make_net(tmp_path, "force_backward: true" + NET)
    generator = np.random.default_rng(1)
    x, wanted = generator.standard_normal((2, 2, 3))
    for _ in range(2):  # results of the pass before leave nothing behind
        net.clear_param_diffs()
        net.blobs["x"].data[...], net.blobs["wanted"].data[...] = x, wanted
        difference = 2.5 * x + 1 - wanted
        assert float(net.forward()["loss"][0]) == pytest.approx((difference**2).sum() / 2, rel=1e-12)
        found = net.backward()
        np.testing.assert_allclose(found["x"], 2.5 * difference, rtol=1e-12)
        np.testing.assert_allclose(found["wanted"], -difference, rtol=1e-12)
        (blob,) = net.params["affine"]
        np.testing.assert_allclose(blob.diff, difference.sum(0), rtol=1e-12)
    net.save(str(tmp_path / "net.caffemodel"))
    other = make_net(tmp_path, NET)
    blob.data[...] = 7.0
    other.copy_from(str(tmp_path / "net.caffemodel"))
    assert other.params["affine"][0].data.tolist() == [1.0] * 3


def test_a_source_of_data_is_asked_for_its_shapes_in_each_pass(tmp_path: Path) -> None:
    text = """
    layer { name: "data" type: "Python" top: "x" top: "zero"
      python_param { module: "python_layers" layer: "Counting" } }
    layer { name: "loss" type: "Python" bottom: "x" bottom: "zero" top: "loss" loss_weight: 1
      python_param { module: "python_layers" layer: "Distance" } }
    """
    for phase in (TRAIN, TEST):
        net = make_net(tmp_path, text, phase)
        for batch in (2, 3):  # the first shapes were asked for when the net was made
            assert float(net.forward()["loss"][0]) == batch * (phase + 1) ** 2
            assert net.blobs["x"].shape == (batch, 2)


def test_what_is_wrong_is_told_with_its_place(tmp_path: Path) -> None:
    cases = {
        r"net\.prototxt:4: layer 'affine': No module named 'nowhere': its folder has to be in PYTHONPATH": (
            'module: "python_layers" layer: "Affine"',
            'module: "nowhere" layer: "Affine"',
        ),
        r"layer 'affine': .*python_layers\.py has no class NOTHING": ('layer: "Affine"', 'layer: "NOTHING"'),
        "layer 'affine': module and layer are missing": ('module: "python_layers" layer: "Affine"', ""),
    }
    for text, (old, new) in cases.items():
        with pytest.raises(PrototxtError, match=text):
            make_net(tmp_path, NET.replace(old, new))
    net = make_net(tmp_path, NET.replace('"Affine"', '"Unfinished"'))
    with pytest.raises(NotImplementedError, match=r"Unfinished has no forward\(self, bottom, top\)"):
        net.forward()


def _datum(**values: Any) -> bytes:
    return message("Datum")(**values).SerializeToString()


def _database(folder: Path, entries: list[bytes]) -> Path:
    with lmdb.open(str(folder)) as database, database.begin(write=True) as transaction:
        for number, entry in enumerate(entries):
            transaction.put(f"{number:08}_name".encode(), entry)
    return folder


def test_an_lmdb(tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (5, 3, 4, 6), np.uint8)
    entries = [
        _datum(channels=3, height=4, width=6, data=image.tobytes(), label=number)
        for number, image in enumerate(pixels)
    ]
    folder = _database(tmp_path / "images", entries)
    samples = open_source(str(folder), "train")
    assert len(samples) == 5
    for index in (0, 2, 4, 1, 1, 3):
        image, label = samples.load(index, 0)
        np.testing.assert_array_equal(image, pixels[index])
        assert (image.dtype, label) == (np.float32, index)
    mean = pixels.mean(0, dtype=np.float32)
    proto = BlobProto(num=1, channels=3, height=4, width=6, data=mean.ravel().tolist())
    (tmp_path / "mean.binaryproto").write_bytes(proto.SerializeToString())
    text = f"""
    layer {{ name: "data" type: "Data" top: "x" top: "label"
      transform_param {{ mean_file: "{tmp_path}/mean.binaryproto" scale: 0.5 crop_size: 2 }}
      data_param {{ source: "{folder}" batch_size: 2 backend: LMDB }} }}
    """
    net = make_net(tmp_path, text, TEST)
    for batch in ([0, 1], [2, 3], [4, 0]):
        net.forward()
        wanted = (0.5 * (pixels[batch] - mean))[:, :, 1:3, 2:4]
        np.testing.assert_allclose(net.blobs["x"].data, wanted, rtol=1e-6)
        assert net.blobs["label"].data.tolist() == batch
    for old, new, told in (
        ("crop_size: 2", "mean_value: 3", "mean_file and mean_value exclude each other"),
        ("mean.binaryproto", "images", "cannot read .*images"),
    ):
        with pytest.raises((PrototxtError, CheckpointError), match=told):
            make_net(tmp_path, text.replace(old, new), TEST)


def test_forms_of_an_entry(tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal((2, 3, 1)).astype(np.float32)
    colours = np.random.default_rng(2).integers(0, 256, (3, 5, 3), np.uint8)
    encoded = []
    for image in (colours, colours[:, :, 0]):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        encoded.append(_datum(encoded=True, data=file.getvalue(), label=3))
    floats = _datum(channels=2, height=3, width=1, float_data=values.ravel().tolist(), label=-1)
    samples = open_source(str(_database(tmp_path / "forms", [floats, *encoded, b"\xff\xff"])), "test")
    wanted = (values, colours[:, :, ::-1].transpose(2, 0, 1), colours[None, :, :, 0])
    for index, (image, label) in enumerate(zip(wanted, (-1, 3, 3), strict=True)):
        found = samples.load(index, 0)
        np.testing.assert_array_equal(found[0], image)
        assert found[1] == label
    with pytest.raises(DataError, match=r"cannot read entry 3 \(00000003_name\) of the LMDB .*forms"):
        samples.load(3, 0)
    with pytest.raises(UsageError, match=r"neither a folder with data\.mdb nor a \.npz file; LevelDB"):
        open_source(str(tmp_path), "train")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _database(tmp_path / "images", [_datum(channels=1, height=1, width=1, data=b"a")])
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(UsageError, match="pip install lmdb"):
        open_source(str(folder), "train")


def test_ranks_share_a_database(tmp_path: Path) -> None:
    entries = [_datum(channels=1, height=1, width=1, data=bytes([k]), label=k) for k in range(6)]
    folder = _database(tmp_path / "images", entries)
    text = f"""
    layer {{ name: "data" type: "Data" top: "x" top: "label"
      data_param {{ source: "{folder}" batch_size: 2 backend: LMDB }} }}
    layer {{ name: "ip" type: "InnerProduct" bottom: "x" top: "y" inner_product_param {{ num_output: 7 }} }}
    layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "y" bottom: "label" top: "loss" }}
    """
    (tmp_path / "net.prototxt").write_text(text)
    (tmp_path / "solver.prototxt").write_text(
        'net: "net.prototxt" base_lr: 0.1 lr_policy: "fixed" max_iter: 1'
    )
    seen = []
    for rank in range(2):
        caffe.set_solver_count(2)
        caffe.set_solver_rank(rank)
        try:
            solver = caffe.Solver(tmp_path / "solver.prototxt")
            solver.net.forward()
            seen.append(solver.net.blobs["label"].data.tolist())
        finally:
            caffe.set_solver_rank(0)
            caffe.set_solver_count(1)
    assert seen == [[0, 2], [1, 3]]
