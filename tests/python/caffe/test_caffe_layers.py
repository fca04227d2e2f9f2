"""The layers of the Caffe-style solver: values, gradients, shapes as Caffe rounds them, and what is refused."""

# ruff: noqa: E501  # a layer of a prototxt reads best in one line

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from multiring.errors import UsageError
from multiring.models.caffe import TEST, Net, PrototxtError
from multiring.models.caffe.schema import message
from tests.python.caffe.caffe_nets import INPUT, check_gradients, make_net

HEAD = """
layer { name: "out" type: "InnerProduct" bottom: "x" top: "out"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } bias_filler { value: 0.1 } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "out" bottom: "label" top: "loss" }
"""
KINDS = {
    "conv": """layer { name: "x" type: "Convolution" bottom: "data" top: "x" convolution_param {
        num_output: 6 kernel_size: 3 kernel_size: 2 stride: 2 pad: 1 dilation: 1 group: 2
        weight_filler { type: "msra" } bias_filler { type: "uniform" } } }""",
    "conv_hw": """layer { name: "x" type: "Convolution" bottom: "data" top: "x" convolution_param {
        num_output: 2 kernel_h: 3 kernel_w: 1 stride_h: 1 stride_w: 2 pad_h: 1 dilation: 2
        weight_filler { type: "msra" variance_norm: AVERAGE } } }""",
    "max": """layer { name: "x" type: "Pooling" bottom: "data" top: "x"
        pooling_param { kernel_size: 3 stride: 2 pad: 1 } }""",
    "max_floor": """layer { name: "x" type: "Pooling" bottom: "data" top: "x"
        pooling_param { kernel_size: 3 stride: 2 round_mode: FLOOR } }""",
    "ave": """layer { name: "x" type: "Pooling" bottom: "data" top: "x"
        pooling_param { pool: AVE kernel_h: 3 kernel_w: 2 stride: 2 pad: 1 } }""",
    "max_wide": """layer { name: "x" type: "Pooling" bottom: "data" top: "x"
        pooling_param { kernel_h: 3 kernel_w: 9 stride: 2 pad: 2 } }""",
    "ave_wide": """layer { name: "x" type: "Pooling" bottom: "data" top: "x"
        pooling_param { pool: AVE kernel_h: 9 kernel_w: 4 stride: 3 pad: 3 } }""",
    "global": """layer { name: "x" type: "Pooling" bottom: "data" top: "x"
        pooling_param { pool: AVE global_pooling: true } }""",
    "relu": """layer { name: "x" type: "ReLU" bottom: "data" top: "x" }""",
    "leaky": """layer { name: "x" type: "ReLU" bottom: "data" top: "x" relu_param { negative_slope: 0.1 } }""",
    "norm": """layer { name: "n" type: "BatchNorm" bottom: "data" top: "x" }
        layer { name: "s" type: "Scale" bottom: "x" top: "x" scale_param { bias_term: true
          filler { type: "gaussian" mean: 1 std: 0.2 } } }""",
    "scale_all": """layer { name: "x" type: "Scale" bottom: "data" top: "x"
        scale_param { axis: 2 num_axes: -1 filler { type: "gaussian" std: 1 } } }""",
    "scale_one": """layer { name: "x" type: "Scale" bottom: "data" top: "x"
        scale_param { axis: 0 num_axes: 0 filler { value: 3 } bias_term: true } }""",
    "scale_by": """layer { name: "f" type: "InnerProduct" bottom: "data" top: "f" inner_product_param {
          num_output: 4 weight_filler { type: "xavier" } } }
        layer { name: "x" type: "Scale" bottom: "data" bottom: "f" top: "x"
          scale_param { axis: 0 bias_term: true bias_filler { type: "uniform" } } }""",
    "scale_by_itself": """layer { name: "r" type: "ReLU" bottom: "data" top: "r" relu_param { negative_slope: 0.5 } }
        layer { name: "x" type: "Scale" bottom: "data" bottom: "r" top: "x" scale_param { axis: 0 } }""",
    "sum": """layer { name: "e" type: "Eltwise" bottom: "data" bottom: "data" bottom: "data" top: "x"
        eltwise_param { coeff: 1 coeff: -0.5 coeff: 2 } }""",
    "product": """layer { name: "r" type: "ReLU" bottom: "data" top: "r" relu_param { negative_slope: 0.5 } }
        layer { name: "e" type: "Eltwise" bottom: "data" bottom: "r" top: "x" eltwise_param { operation: PROD } }""",
    "maximum": """layer { name: "c" type: "Scale" bottom: "data" top: "c" scale_param { filler { value: -1 } } }
        layer { name: "e" type: "Eltwise" bottom: "data" bottom: "c" top: "x" eltwise_param { operation: MAX } }""",
    "transpose": """layer { name: "x" type: "InnerProduct" bottom: "data" top: "x" inner_product_param {
        num_output: 5 transpose: true axis: -1 weight_filler { type: "xavier" variance_norm: FAN_OUT } } }""",
    "lrn": """layer { name: "x" type: "LRN" bottom: "data" top: "x"
        lrn_param { local_size: 3 alpha: 0.5 beta: 0.6 k: 2 } }""",
    "lrn_within": """layer { name: "x" type: "LRN" bottom: "data" top: "x"
        lrn_param { local_size: 3 alpha: 0.5 norm_region: WITHIN_CHANNEL } }""",
    "softmax": """layer { name: "x" type: "Softmax" bottom: "data" top: "x" softmax_param { axis: -1 } }""",
}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_differences(tmp_path: Path, kind: str) -> None:
    net = make_net(tmp_path, INPUT + KINDS[kind] + HEAD)
    net.blobs["data"].data[...] = np.random.default_rng(1).standard_normal((3, 4, 7, 6))
    net.blobs["label"].data[...] = [0, 2, 1]
    check_gradients(net)


@pytest.mark.parametrize("mode", ["FULL", "VALID", "BATCH_SIZE", "NONE"])
def test_the_loss_over_places_with_a_label_to_ignore(tmp_path: Path, mode: str) -> None:
    text = f"""force_backward: true
    layer {{ name: "data" type: "Input" top: "data" top: "label"
      input_param {{ shape {{ dim: 2 dim: 3 dim: 2 dim: 2 }} shape {{ dim: 2 dim: 1 dim: 2 dim: 2 }} }} }}
    layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "data" bottom: "label" top: "loss" top: "p"
      loss_weight: 0.5 loss_weight: 0 loss_param {{ ignore_label: 7 normalization: {mode} }} }}
    layer {{ name: "acc" type: "Accuracy" bottom: "data" bottom: "label" top: "acc"
      accuracy_param {{ top_k: 2 ignore_label: 7 }} }}"""
    net = make_net(tmp_path, text)
    scores = np.random.default_rng(0).standard_normal((2, 3, 2, 2))
    labels = np.array([0, 7, 2, 1, 1, 1, 7, 0])
    net.blobs["data"].data[...] = scores
    net.blobs["label"].data[...] = labels.reshape(2, 1, 2, 2)
    check_gradients(net)
    found = net.forward()
    rows = scores.reshape(2, 3, 4).transpose(0, 2, 1).reshape(8, 3)
    odds = np.exp(rows) / np.exp(rows).sum(1, keepdims=True)
    kept = np.flatnonzero(labels != 7)
    total = -np.log(odds[kept, labels[kept]]).sum()
    divisor = {"FULL": 8, "VALID": 6, "BATCH_SIZE": 2, "NONE": 1}[mode]
    assert found["loss"] == pytest.approx(total / divisor, rel=1e-12)
    assert net.loss == pytest.approx(0.5 * total / divisor, rel=1e-12)
    right = [labels[k] in np.argsort(rows[k])[-2:] for k in kept]
    assert found["acc"] == pytest.approx(np.mean(right))
    wanted = odds.reshape(2, 4, 3).transpose(0, 2, 1).reshape(scores.shape)
    np.testing.assert_allclose(net.blobs["p"].data, wanted)


POOLED = """force_backward: true
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 1 dim: %d dim: %d } } }
layer { name: "x" type: "Pooling" bottom: "data" top: "x"
  pooling_param { pool: %s kernel_size: %d stride: %d pad: %d } }
"""


def pooled(image: np.ndarray, kernel: int, stride: int, pad: int, mean: bool) -> np.ndarray:
    """Caffe's definition, window by window."""
    height, width = image.shape
    sizes = []
    for extent in (height, width):
        size = math.ceil((extent + 2 * pad - kernel) / stride) + 1
        sizes.append(size - 1 if pad and (size - 1) * stride >= extent + pad else size)
    result = np.empty(sizes)
    for row in range(sizes[0]):
        for column in range(sizes[1]):
            top, left = row * stride - pad, column * stride - pad
            bottom, right = min(top + kernel, height + pad), min(left + kernel, width + pad)
            area = (bottom - top) * (right - left)
            window = image[max(top, 0) : min(bottom, height), max(left, 0) : min(right, width)]
            least = np.finfo(np.float32).min  # what Caffe starts a maximum with
            total = window.sum() / area if area else np.nan
            result[row, column] = total if mean else window.max(initial=least)
    return result


@pytest.mark.parametrize(
    ("height", "kernel", "stride", "pad"),
    [
        (8, 3, 2, 1),
        (6, 2, 2, 1),
        (5, 5, 1, 0),
        (4, 5, 2, 0),  # larger than the image
        (5, 3, 1, 2),  # a pad of more than half a window
        (6, 4, 3, 3),
        (4, 1, 2, 0),  # the last window begins outside
        (8, 2, 9, 0),
    ],
)
def test_pooling_rounds_as_caffe(tmp_path: Path, height: int, kernel: int, stride: int, pad: int) -> None:
    image = np.random.default_rng(0).standard_normal((height, height + 1))
    for pool in ("MAX", "AVE"):
        net = make_net(tmp_path, POOLED % (height, height + 1, pool, kernel, stride, pad))
        net.blobs["data"].data[0, 0] = image
        wanted = pooled(image, kernel, stride, pad, pool == "AVE")
        assert net.blobs["x"].shape[2:] == wanted.shape
        np.testing.assert_allclose(net.forward()["x"][0, 0], wanted, rtol=1e-12)


@pytest.mark.parametrize("pool", ["MAX", "AVE"])
def test_windows_that_begin_outside_have_no_gradient(tmp_path: Path, pool: str) -> None:
    net = make_net(tmp_path, POOLED % (4, 3, pool, 1, 2, 0))
    net.forward()
    given = np.arange(1.0, 7.0).reshape(1, 1, 3, 2)
    wanted = np.zeros((1, 1, 4, 3))
    wanted[:, :, ::2, ::2] = given[:, :, :2]
    np.testing.assert_array_equal(net.backward(x=given)["data"], wanted)


def test_the_loss_of_a_sample_ends_at_the_least_float(tmp_path: Path) -> None:
    text = """force_backward: true
    layer { name: "data" type: "Input" top: "data" top: "label" input_param { shape { dim: 2 dim: 3 } shape { dim: 2 } } }
    layer { name: "loss" type: "SoftmaxWithLoss" bottom: "data" bottom: "label" top: "loss" }"""
    net = make_net(tmp_path, text)
    net.blobs["data"].data[...] = [[200, 0, 0], [0, 80, 0]]
    net.blobs["label"].data[...] = [1, 2]
    least = -math.log(np.finfo(np.float32).tiny)
    assert float(net.forward()["loss"]) == pytest.approx((least + 80) / 2, rel=1e-12)
    np.testing.assert_allclose(net.backward()["data"], [[0.5, -0.5, 0], [0, 0.5, -0.5]], atol=1e-12)


@pytest.mark.parametrize("stable", [True, False])
def test_the_gradient_of_a_product_with_zeros(tmp_path: Path, stable: bool) -> None:
    text = f"""force_backward: true
    layer {{ name: "in" type: "Input" top: "a" top: "b" input_param {{ shape {{ dim: 3 }} shape {{ dim: 3 }} }} }}
    layer {{ name: "x" type: "Eltwise" bottom: "a" bottom: "b" top: "x"
      eltwise_param {{ operation: PROD stable_prod_grad: {str(stable).lower()} }} }}"""
    net = make_net(tmp_path, text)
    net.blobs["a"].data[...], net.blobs["b"].data[...] = [0, 2, 3], [5, 0, 7]
    net.forward()
    found = net.backward(x=np.array([1.0, 1.0, 2.0]))
    unknown = np.nan  # 0 / 0
    np.testing.assert_array_equal(found["a"], [5 if stable else unknown, 0, 14])
    np.testing.assert_array_equal(found["b"], [0, 2 if stable else unknown, 6])


def test_batch_statistics_are_gathered_as_caffe_does(tmp_path: Path) -> None:
    text = f"""{INPUT} layer {{ name: "n" type: "BatchNorm" bottom: "data" top: "n"
      batch_norm_param {{ moving_average_fraction: 0.75 eps: 0.001 }} }}"""
    net = make_net(tmp_path, text)
    mean, variance, weight = np.zeros(4), np.zeros(4), 0.0
    for step in range(3):
        x = np.random.default_rng(step).standard_normal((3, 4, 7, 6)) + step
        net.blobs["data"].data[...] = x
        y = net.forward()["n"]
        m, v = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
        np.testing.assert_allclose(y, (x - m) / np.sqrt(v + 0.001), rtol=1e-10, atol=1e-12)
        mean = 0.75 * mean + m.ravel()
        variance = 0.75 * variance + v.ravel() * 126 / 125
        weight = 0.75 * weight + 1
    for blob, wanted in zip(net.params["n"], (mean, variance, [weight]), strict=True):
        np.testing.assert_allclose(blob.data, wanted, rtol=1e-12)
    test = make_net(tmp_path, text, TEST)
    test.share_with(net)
    test.blobs["data"].data[...] = x
    shape = (1, 4, 1, 1)
    wanted = (x - (mean / weight).reshape(shape)) / np.sqrt((variance / weight).reshape(shape) + 0.001)
    np.testing.assert_allclose(test.forward()["n"], wanted, rtol=1e-10)
    assert [one.lr_mult for one in net.learnable] == [0, 0, 0]


def test_blobs_that_are_read_twice_are_split_as_in_caffe(tmp_path: Path) -> None:
    text = """
    layer { name: "a" type: "ReLU" bottom: "data" top: "a" }
    layer { name: "b" type: "ReLU" bottom: "a" top: "b" }
    layer { name: "c" type: "Eltwise" bottom: "b" bottom: "a" top: "c" }"""
    net = make_net(tmp_path, INPUT + text)
    assert net._layer_names == ["data", "a", "a_a_0_split", "b", "c"]
    assert net.bottom_names["b"] == ["a_a_0_split_0"]
    assert net.bottom_names["c"] == ["b", "a_a_0_split_1"]
    assert net.outputs == ["c", "label"]


SHARED = """
layer { name: "a" type: "Convolution" bottom: "data" top: "a" param { name: "w" decay_mult: 3 }
  convolution_param { num_output: 4 kernel_size: 1 bias_term: false weight_filler { type: "msra" } } }
layer { name: "b" type: "Convolution" bottom: "a" top: "x" param { name: "w" %s }
  convolution_param { num_output: %d kernel_size: 1 bias_term: false weight_filler { type: "msra" } } }
"""


def test_weights_are_shared_by_name(tmp_path: Path) -> None:
    def make(more: str, outputs: int) -> Net:
        return make_net(tmp_path, INPUT + SHARED % (more, outputs) + HEAD)

    net = make("", 4)
    assert [one.name for one in net.learnable] == ["a[0]", "out[0]", "out[1]"]
    first, second = net.params["a"][0], net.params["b"][0]
    assert np.shares_memory(first.data, second.data)
    assert np.shares_memory(first.diff, second.diff)
    net.blobs["data"].data[...] = np.random.default_rng(1).standard_normal((3, 4, 7, 6))
    check_gradients(net)
    with pytest.raises(PrototxtError, match=r"prototxt:7: layer 'b': decay_mult 1 differs from 3 of a\[0\]"):
        make("decay_mult: 1", 4)
    with pytest.raises(PrototxtError, match=r"blob 0 of shape \(2, 4, 1, 1\) cannot be shared with a\[0\]"):
        make("", 2)


REFUSED = {
    'layer { name: "a" type: "PReLU" bottom: "data" top: "a" }': "5: .*type 'PReLU', which is not supported; .*Pooling",
    'layer { name: "a" type: "LRN" bottom: "data" top: "a"\n lrn_param { local_size: 2 } }': "6: layer 'a': local_size has",
    'layer { name: "a" type: "ReLU" bottom: "data" top: "a"\nlayer { name: "b" type: "ReLU" bottom: "a" top: "b" }': (
        "6: field layer of LayerParameter is not supported; it is one of NetParameter: a closing brace is missing"
    ),
    'layer { name: "a" type: "ReLU" bottom: "dat" top: "a" }': "5: layer 'a' reads blob 'dat', which no layer",
    'layer { name: "a" type: "ReLU"\n bottom: "data" top: "a" top: "b" }': "5: layer 'a': ReLU takes 1 top blobs, not 2",
    'layer { name: "a" type: "ReLU" bottom: "data" top: "a"\n prelu_param { } }': "6: field prelu_param of Layer",
    'layer { name: "a" type: "Pooling" bottom: "data" top: "a"\n pooling_param {\n pool: STOCHASTIC kernel_size: 2 } }': (
        "7: layer 'a': pool: STOCHASTIC is not supported"
    ),
    'layer { name: "a" type: "Convolution" bottom: "data" top: "a" convolution_param {\n num_output: 2 kernel_size: 2\n'
    ' weight_filler {\n type: "bilinear" } } }': "8: filler type 'bilinear' is not supported",
    'layer { name: "a" type: "Scale" bottom: "data" bottom: "label" top: "a" }': (
        r"5: layer 'a': a factor of shape \(3,\) does not fit axes 1 to 2 of"
    ),
    'layer { name: "a" type: "Pooling" bottom: "data" top: "a"\n pooling_param { kernel_size: 9 } }': (
        "6: layer 'a': no window of 9 pixels fits an image of 7 with stride 1 and pad 0"
    ),
    'layers { name: "a" type: PRELU }': "5: .*type 'Prelu', which is not supported",
    'layers { name: "a"\n type: RELU bottom: "data"\n top: "a"\n lowest: 1 }': "8: field lowest of LayerParameter",
    'layer { name: "a" type: "ReLU" bottom: "data" top: "label" }': "5: layer 'a': blob 'label' is given by an earlier",
    'layer { name: "a" type: "InnerProduct" bottom: "data" top: "a"\n inner_product_param { num_output: 2 axis: 4 } }': (
        "6: layer 'a': axis 4 is not one of shape"
    ),
    'layer { name: "a" type: "Data" top: "a"\n data_param { source: "x_lmdb" batch_size: 2 } }': (
        "6: layer 'a': x_lmdb is neither a folder with data.mdb nor a .npz file"
    ),
    'layer { name: "a" type: "ReLU" bottom: "data" top: "a" }}': "5: ",
    'layer { name: "a" type: "ReLU" bottom: "data" top: "a"\n loss_weight: 1 loss_weight: 2 }': (
        "6: layer 'a': 2 values of loss_weight are given for 1 top blobs"
    ),
    'layer { name: "a" type: "InnerProduct" bottom: "data" top: "a" param { }\n param { }\n param { }'
    " inner_product_param { num_output: 2 } }": "7: layer 'a': 3 param are given for 2 blobs",
}


def test_what_is_not_supported_is_named_with_its_line(tmp_path: Path) -> None:
    for text, told in REFUSED.items():
        with pytest.raises(PrototxtError, match=f"net.prototxt:{told}"):
            make_net(tmp_path, INPUT + "\n" + text)


def test_local_response_normalisation_is_caffes(tmp_path: Path) -> None:
    x = np.random.default_rng(4).standard_normal((3, 4, 7, 6))
    for region, shift in (("ACROSS_CHANNELS", 2.0), ("WITHIN_CHANNEL", 1.0)):
        net = make_net(
            tmp_path,
            INPUT
            + 'layer { name: "x" type: "LRN" bottom: "data" top: "x" lrn_param { local_size: 3 alpha: 0.5 '
            f"beta: 0.6 k: 2 norm_region: {region} }} }}",
        )
        net.blobs["data"].data[...] = x
        net.forward()
        across = region == "ACROSS_CHANNELS"
        padded = np.pad(
            x**2, [(0, 0), (1, 1), (0, 0), (0, 0)] if across else [(0, 0), (0, 0), (1, 1), (1, 1)]
        )
        if across:
            total = sum(padded[:, k : k + 4] for k in range(3)) / 3
        else:
            total = sum(padded[:, :, i : i + 7, j : j + 6] for i in range(3) for j in range(3)) / 9
        np.testing.assert_allclose(net.blobs["x"].data, x * (shift + 0.5 * total) ** -0.6, rtol=1e-6)


def test_dropout(tmp_path: Path) -> None:
    """Values are kept at random, and scaled so that their mean stays; in testing all are."""
    layer = (
        'layer { name: "x" type: "Dropout" bottom: "data" top: "x" dropout_param { dropout_ratio: 0.25 } }'
    )
    big = INPUT.replace("dim: 3 dim: 4 dim: 7 dim: 6", "dim: 3 dim: 40 dim: 20 dim: 20")
    net = make_net(tmp_path, big + layer)
    net.blobs["data"].data[...] = 1.0
    seen = []
    for _ in range(2):
        net.forward()
        found = net.blobs["x"].data.copy()
        np.testing.assert_allclose(np.unique(found), [0.0, 1 / 0.75], rtol=1e-6)
        assert abs((found == 0).mean() - 0.25) < 0.02
        net.blobs["x"].diff[...] = 1.0
        net.backward()
        np.testing.assert_array_equal(net.blobs["data"].diff, found)
        seen.append(found)
    assert not np.array_equal(*seen)
    test_net = make_net(tmp_path, big + layer, phase=TEST)
    test_net.blobs["data"].data[...] = 1.0
    test_net.forward()
    np.testing.assert_array_equal(test_net.blobs["x"].data, 1.0)


def test_a_mark_of_the_encoding_is_no_part_of_the_net(tmp_path: Path) -> None:
    path = tmp_path / "net.prototxt"
    path.write_text(INPUT + KINDS["relu"], encoding="utf-8-sig")
    assert "x" in Net(str(path), TEST).blobs


def test_a_label_outside_of_the_classes_is_an_error(tmp_path: Path) -> None:
    net = make_net(tmp_path, INPUT + KINDS["relu"] + HEAD)
    net.blobs["label"].data[...] = [0, 3, 1]
    with pytest.raises(UsageError, match="layer 'loss': label 3 is outside the 3 classes of blob 'out'"):
        net.forward()


def test_fields_have_caffes_numbers_and_defaults() -> None:
    """Those of the published caffe.proto, written down here anew."""
    wanted = {
        "NetParameter": {"name": 1, "input": 3, "input_dim": 4, "state": 6, "input_shape": 8, "layer": 100},
        "LayerParameter": {"loss_weight": 5, "param": 6, "blobs": 7, "include": 8, "exclude": 9, "phase": 10}
        | {"propagate_down": 11, "batch_norm_param": 139, "convolution_param": 106, "eltwise_param": 110}
        | {"pooling_param": 121, "scale_param": 142, "inner_product_param": 117, "input_param": 143},
        "BlobProto": {"num": 1, "data": 5, "diff": 6, "shape": 7, "double_data": 8},
        "SolverState": {"iter": 1, "learned_net": 2, "history": 3, "current_step": 4},
        "SolverParameter": {"net": 24, "base_lr": 5, "momentum2": 39, "type": 40, "iter_size": 36},
        "ConvolutionParameter": {"num_output": 1, "pad": 3, "kernel_size": 4, "group": 5, "stride": 6},
    }
    for name, numbers in wanted.items():
        fields = message(name).DESCRIPTOR.fields_by_name
        assert {field: fields[field].number for field in numbers} == numbers
    assert message("FillerParameter")().type == "constant"
    assert message("BatchNormParameter")().eps == pytest.approx(1e-5)
    assert message("SolverParameter")().test_initialization
