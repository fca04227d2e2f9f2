"""The ResNet specification as Caffe's prototxt, and its weights in a net.

A layer of the specification bears the same name in Caffe; batch normalisation is two layers there, the
second of which (`<name>.scale`) has factor and offset. ReLU and Scale work in place, as is usual in Caffe.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from multiring.models.caffe import Net
from multiring.models.caffe.blob import Blob
from multiring.models.nets import layers
from multiring.models.nets.resnet_spec import INPUT, ResNetSpec, resnet
from multiring.models.nets.weights import check_weights

__all__ = ["DATA", "LABEL", "LOSS", "digits_example", "load_weights", "read_weights", "train_val"]

Array = npt.NDArray[Any]
DATA, LABEL, LOSS = "data", "label", "loss"


def train_val(
    spec: ResNetSpec, *, name: str, data: str, normalization: str = "VALID", zero_residual: bool = False
) -> str:
    """A net for training and testing as prototxt.

    Args:
        spec: The network.
        name: Name of the net.
        data: Layers that give the blobs `data` and `label`, as text.
        normalization: How the loss is normalised; "NONE" for its sum.
        zero_residual: Start the last scale of each residual branch at 0.
    """
    blobs = {INPUT: DATA}
    parts = [f'name: "{name}"', data.strip()]
    for layer in spec.layers:
        parts.extend(_text(layer, blobs, zero_residual))
    scores = blobs[spec.output]
    parts.append(
        f'layer {{\n  name: "{LOSS}"\n  type: "SoftmaxWithLoss"\n  bottom: "{scores}"\n  bottom: "{LABEL}"\n'
        f'  top: "{LOSS}"\n  loss_param {{ normalization: {normalization} }}\n}}'
    )
    parts.append(
        f'layer {{\n  name: "accuracy"\n  type: "Accuracy"\n  bottom: "{scores}"\n  bottom: "{LABEL}"\n'
        '  top: "accuracy"\n  include { phase: TEST }\n}'
    )
    return "\n".join(parts) + "\n"


def _text(layer: layers.Layer, blobs: dict[str, str], zero_residual: bool) -> Iterator[str]:
    """The layers that one of the specification becomes; notes the blob that holds its result."""
    bottoms = [blobs[name] for name in layer.inputs]
    blobs[layer.name] = bottoms[0] if isinstance(layer, layers.Relu) else layer.name
    kind, *body = _kind_and_body(layer)
    yield _layer(layer.name, kind, bottoms, blobs[layer.name], body)
    if isinstance(layer, layers.BatchNorm):
        filler = "filler { value: 0 } " if zero_residual and layer.closes_block else ""
        body = ["param { lr_mult: 1 decay_mult: 0 }"] * 2 + [f"scale_param {{ {filler}bias_term: true }}"]
        yield _layer(f"{layer.name}.scale", "Scale", [layer.name], layer.name, body)


def _kind_and_body(layer: layers.Layer) -> list[str]:
    """What a layer is called in Caffe, and its settings."""
    match layer:
        case layers.Conv():
            return [
                "Convolution",
                "param { lr_mult: 1 decay_mult: 1 }",
                f"convolution_param {{ num_output: {layer.out_channels} bias_term: false",
                f"    kernel_size: {layer.kernel} stride: {layer.stride} pad: {layer.padding}",
                '    weight_filler { type: "msra" variance_norm: FAN_OUT } }',
            ]
        case layers.BatchNorm():
            return [
                "BatchNorm",
                *["param { lr_mult: 0 decay_mult: 0 }"] * 3,
                f"batch_norm_param {{ moving_average_fraction: {1 - layer.momentum:g} eps: {layer.eps:g} }}",
            ]
        case layers.Relu():
            return ["ReLU"]
        case layers.MaxPool():
            return [
                "Pooling",
                "pooling_param { pool: MAX round_mode: FLOOR",
                f"    kernel_size: {layer.kernel} stride: {layer.stride} pad: {layer.padding} }}",
            ]
        case layers.Add():
            return ["Eltwise", "eltwise_param { operation: SUM }"]
        case layers.GlobalAveragePool():
            return ["Pooling", "pooling_param { pool: AVE global_pooling: true }"]
        case layers.Dense():
            return [
                "InnerProduct",
                "param { lr_mult: 1 decay_mult: 1 }",
                "param { lr_mult: 1 decay_mult: 0 }",
                f"inner_product_param {{ num_output: {layer.out_features}",
                f'    weight_filler {{ type: "gaussian" std: {math.sqrt(1 / layer.in_features):g} }} }}',
            ]


def _layer(name: str, kind: str, bottoms: list[str], top: str, body: list[str]) -> str:
    lines = [f'name: "{name}"', f'type: "{kind}"', *(f'bottom: "{bottom}"' for bottom in bottoms)]
    return "\n".join(["layer {", *(f"  {line}" for line in [*lines, f'top: "{top}"', *body]), "}"])


def _learned(net: Net, spec: ResNetSpec) -> dict[str, Blob]:
    """All blobs that learn by the specification's names."""
    found = {}
    for parameter in spec.parameters():
        layer, _, kind = parameter.name.rpartition(".")
        owner = f"{layer}.scale" if parameter.kind in ("scale", "shift") else layer
        found[parameter.name] = net.params[owner][("weight", "bias").index(kind)]
    return found


def load_weights(net: Net, spec: ResNetSpec, weights: Mapping[str, Array]) -> None:
    """Copy weights into the net by the specification's names, converting to the net's dtype.

    Caffe keeps sums whose weights add up to `blobs[2]`. Set to 1 / momentum, at which that sum stays in every
    step, they move exactly as the specification's running statistics do.

    Raises:
        UsageError: A name is missing or unknown, or a shape differs; nothing was copied.
    """
    check_weights(spec, weights)
    for name, blob in _learned(net, spec).items():
        blob.data[...] = weights[name]
    for layer in spec.layers:
        if isinstance(layer, layers.BatchNorm):
            mean, variance, total = net.params[layer.name]
            total.data[...] = 1 / layer.momentum
            mean.data[...] = weights[f"{layer.name}.running_mean"] / layer.momentum
            variance.data[...] = weights[f"{layer.name}.running_var"] / layer.momentum


def read_weights(net: Net, spec: ResNetSpec, *, gradients: bool = False) -> dict[str, Array]:
    """Copies of all parameters and running statistics by name, as `load_weights` takes them.

    Args:
        net: The net.
        spec: What it was made of.
        gradients: Give the gradients of the parameters instead, without statistics.
    """
    if gradients:
        return {name: blob.diff.copy() for name, blob in _learned(net, spec).items()}
    found = {name: blob.data.copy() for name, blob in _learned(net, spec).items()}
    for layer in spec.layers:
        if isinstance(layer, layers.BatchNorm):
            mean, variance, total = (blob.data for blob in net.params[layer.name])
            divisor = total[0] if total[0] else np.ones_like(total)[0]
            found[f"{layer.name}.running_mean"] = mean / divisor
            found[f"{layer.name}.running_var"] = variance / divisor
    return found


def digits_example() -> dict[str, str]:
    """The files of `examples/caffe` by name: ResNet-8 on scikit-learn's digits."""
    data = "\n".join(
        f'layer {{\n  name: "{DATA}"\n  type: "Data"\n  top: "{DATA}"\n  top: "{LABEL}"\n'
        f"  include {{ phase: {phase} }}\n"
        f'  data_param {{ source: "digits" batch_size: {batch} }}\n}}'
        for phase, batch in (("TRAIN", 32), ("TEST", 52))
    )
    solver = """\
# Train with `multiring caffe train --solver examples/caffe/solver.prototxt -np 2` from the repository's root.
net: "train_val.prototxt"
# 7 batches of 52 are the 364 test images.
test_iter: 7
test_interval: 60
test_initialization: false
base_lr: 0.1
lr_policy: "poly"
power: 1.0
momentum: 0.9
weight_decay: 0.0001
type: "Nesterov"
max_iter: 240
display: 20
average_loss: 20
snapshot: 120
snapshot_prefix: "resnet8_digits"
random_seed: 1
solver_mode: CPU
"""
    spec = resnet(8, classes=10, in_channels=1)
    note = "# Written by models/nets/resnet_caffe.py from the specification that every framework builds.\n"
    return {
        "solver.prototxt": solver,
        "train_val.prototxt": note + train_val(spec, name="ResNet-8 on digits", data=data),
    }
