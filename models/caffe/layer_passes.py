"""What a layer does in a pass to the blobs of its net."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch

from multiring.models.caffe.blob import Blob
from multiring.models.caffe.device import CPU
from multiring.models.caffe.layer import Layer

__all__ = ["run_backward", "run_forward"]


def run_forward(layer: Layer, blobs: Mapping[str, Blob], weights: Mapping[str, float]) -> float:
    """Run a layer's forward pass; the part of its tops in the loss.

    Args:
        layer: The layer.
        blobs: Those of the net, by name. The tops get the results.
        weights: Weight of each blob in the loss.
    """
    if layer.type == "Input":
        return 0.0
    bottoms = [blobs[name] for name in layer.param.bottom]
    values = [blob.tensor for blob in bottoms]
    if values:  # shapes may have changed since the last pass
        layer.infer([tuple(value.shape) for value in values])
    loss = 0.0
    for name, value in zip(layer.param.top, layer.forward(values), strict=True):
        blob = blobs[name]
        if (bottom := _owner(value, bottoms, values)) is not None:
            blob.become(bottom)
        else:
            blob.tensor = value
        if weight := weights[name]:
            if not blob.has_gradient:
                blob.gradient.fill_(weight)
            loss += weight * float(value.sum())
    return loss


def run_backward(
    layer: Layer, blobs: Mapping[str, Blob], given: Container[str], wanted: Sequence[bool]
) -> None:
    """Run a layer's backward pass.

    Args:
        layer: The layer.
        blobs: Those of the net, by name. The bottoms get the gradients.
        given: Names of the tops whose gradient the layer reads.
        wanted: Per bottom, whether its gradient is used.
    """
    bottoms, tops = ([blobs[name] for name in names] for names in (layer.param.bottom, layer.param.top))
    for blob in (*bottoms, *tops, *layer.blobs):
        if blob.device != CPU:  # the layer has kept tensors, and the program may have written to arrays
            blob.send()
    gradients = [
        blob.gradient if name in given else None for name, blob in zip(layer.param.top, tops, strict=True)
    ]
    found = layer.backward(gradients, wanted)
    for bottom, is_wanted, gradient in zip(bottoms, wanted, found, strict=True):
        if not is_wanted or gradient is None:
            continue
        if (top := _owner(gradient, tops, gradients)) is not None:
            bottom.become_gradient(top)
        else:
            bottom.gradient = gradient


def _owner(
    tensor: torch.Tensor, blobs: Sequence[Blob], tensors: Sequence[torch.Tensor | None]
) -> Blob | None:
    """The blob that a layer has this tensor from, which it then gives on as it is. One memory has to have one
    state of what the host and the device hold."""
    return next((blob for blob, own in zip(blobs, tensors, strict=True) if own is tensor), None)
