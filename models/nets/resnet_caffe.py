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

from multiring.errors import UsageError
from multiring.models.caffe import Net
from multiring.models.nets.resnet_spec import (
    INPUT,
    Add,
    BatchNorm,
    Conv,
    Dense,
    GlobalAveragePool,
    Layer,
    MaxPool,
    Relu,
    ResNetSpec,
    resnet,
)
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


def _text(layer: Layer, blobs: dict[str, str], zero_residual: bool) -> Iterator[str]:
    """The layers that one of the specification becomes; notes the blob that holds its result."""
    bottoms = [blobs[name] for name in layer.inputs]
    # One branch per kind of layer: the table of what each becomes in Caffe.
    if isinstance(layer, Conv):
        body = [
            "param { lr_mult: 1 decay_mult: 1 }",
            f"convolution_param {{ num_output: {layer.out_channels} bias_term: false",
            f"    kernel_size: {layer.kernel} stride: {layer.stride} pad: {layer.padding}",
            '    weight_filler { type: "msra" variance_norm: FAN_OUT } }',
        ]
        yield _layer(layer.name, "Convolution", bottoms, layer.name, body)
    elif isinstance(layer, BatchNorm):
        body = [
            *["param { lr_mult: 0 decay_mult: 0 }"] * 3,
            f"batch_norm_param {{ moving_average_fraction: {1 - layer.momentum:g} eps: {layer.eps:g} }}",
        ]
        yield _layer(layer.name, "BatchNorm", bottoms, layer.name, body)
        filler = "filler { value: 0 } " if zero_residual and layer.closes_block else ""
        body = ["param { lr_mult: 1 decay_mult: 0 }"] * 2 + [f"scale_param {{ {filler}bias_term: true }}"]
        yield _layer(f"{layer.name}.scale", "Scale", [layer.name], layer.name, body)
    elif isinstance(layer, Relu):
        yield _layer(layer.name, "ReLU", bottoms, bottoms[0], [])
        blobs[layer.name] = bottoms[0]
        return
    elif isinstance(layer, MaxPool):
        body = [
            "pooling_param { pool: MAX round_mode: FLOOR",
            f"    kernel_size: {layer.kernel} stride: {layer.stride} pad: {layer.padding} }}",
        ]
        yield _layer(layer.name, "Pooling", bottoms, layer.name, body)
    elif isinstance(layer, Add):
        yield _layer(layer.name, "Eltwise", bottoms, layer.name, ["eltwise_param { operation: SUM }"])
    elif isinstance(layer, GlobalAveragePool):
        body = ["pooling_param { pool: AVE global_pooling: true }"]
        yield _layer(layer.name, "Pooling", bottoms, layer.name, body)
    elif isinstance(layer, Dense):
        body = [
            "param { lr_mult: 1 decay_mult: 1 }",
            "param { lr_mult: 1 decay_mult: 0 }",
            f"inner_product_param {{ num_output: {layer.out_features}",
            f'    weight_filler {{ type: "gaussian" std: {math.sqrt(1 / layer.in_features):g} }} }}',
        ]
        yield _layer(layer.name, "InnerProduct", bottoms, layer.name, body)
    else:
        raise UsageError(f"layer {layer.name} is of a kind that Caffe's net does not know")
    blobs[layer.name] = layer.name


def _layer(name: str, kind: str, bottoms: list[str], top: str, body: list[str]) -> str:
    lines = [f'name: "{name}"', f'type: "{kind}"', *(f'bottom: "{bottom}"' for bottom in bottoms)]
    return "\n".join(["layer {", *(f"  {line}" for line in [*lines, f'top: "{top}"', *body]), "}"])


def _learned(net: Net, spec: ResNetSpec) -> dict[str, Array]:
    """Views of all parameters in the net by the specification's names."""
    found: dict[str, Array] = {}
    for layer in spec.layers:
        if isinstance(layer, Conv | Dense):
            blobs = net.params[layer.name]
        elif isinstance(layer, BatchNorm):
            blobs = net.params[f"{layer.name}.scale"]
        else:
            continue
        for kind, blob in zip(("weight", "bias"), blobs, strict=False):
            found[f"{layer.name}.{kind}"] = blob.data
    return found


def load_weights(net: Net, spec: ResNetSpec, weights: Mapping[str, Array]) -> None:
    """Copy weights into the net by the specification's names, converting to the net's dtype.

    Caffe keeps sums whose weights add up to `blobs[2]`. Set to 1 / momentum, at which that sum stays in every
    step, they move exactly as the specification's running statistics do.

    Raises:
        UsageError: A name is missing or unknown, or a shape differs; nothing was copied.
    """
    check_weights(spec, weights)
    for name, value in _learned(net, spec).items():
        value[...] = weights[name]
    for layer in spec.layers:
        if isinstance(layer, BatchNorm):
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
        found = {}
        for layer in spec.layers:
            owner = f"{layer.name}.scale" if isinstance(layer, BatchNorm) else layer.name
            for kind, blob in zip(("weight", "bias"), net.params.get(owner, ()), strict=False):
                found[f"{layer.name}.{kind}"] = blob.diff.copy()
        return found
    found = {name: value.copy() for name, value in _learned(net, spec).items()}
    for layer in spec.layers:
        if isinstance(layer, BatchNorm):
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
