"""Nets in the syntax of 2014."""

from __future__ import annotations

from pathlib import Path

from multiring.models.caffe.prototxt import parse
from multiring.models.caffe.schema import NetParameter
from tests.python.caffe.caffe_nets import INPUT, make_net

OLD = """
layers { name: "conv" type: CONVOLUTION bottom: "data" top: "conv"
  blobs_lr: 1 blobs_lr: 2  # of weight and bias
  weight_decay: 1
  weight_decay: 0
  convolution_param { num_output: 2 kernel_size: 3 weight_filler { type: "xavier" } } }
layers {
  name: "relu" type: RELU bottom: "conv" top: "conv" }
layers { name: "x" type: INNER_PRODUCT bottom: "conv" top: "x" param: "w" param: "b"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layers { name: "loss" type: SOFTMAX_LOSS bottom: "x" bottom: "label" top: "loss" }
"""
NEW = """
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  param { lr_mult: 1 decay_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
  convolution_param { num_output: 2 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "x" type: "InnerProduct" bottom: "conv" top: "x" param { name: "w" } param { name: "b" }
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "x" bottom: "label" top: "loss" }
"""


def test_nets_of_2014_are_upgraded(tmp_path: Path) -> None:
    old, new = (parse(INPUT + text, NetParameter)[0] for text in (OLD, NEW))
    assert old == new
    net = make_net(tmp_path, INPUT + OLD)
    net.forward()
    assert [one.decay_mult for one in net.learnable] == [1, 0, 1, 1]
    assert parse(NEW, NetParameter)[0] == parse(NEW.replace("layer {", "layer{"), NetParameter)[0]
