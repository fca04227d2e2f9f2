"""The learned blobs of a net with what the solver needs of each; shared ones occur once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from multiring.models.caffe.blob import Blob, decimal
from multiring.models.caffe.layer import Layer

__all__ = ["Learnable", "collect_learnable"]

_PERMISSIVE = 1


@dataclass(frozen=True)
class Learnable:
    """A learned blob.

    Attributes:
        name: "layer[number]".
        blob: The blob of the layer that owns it.
        lr_mult: Factor of the learning rate; with 0 it does not learn.
        decay_mult: Factor of the weight decay.
    """

    name: str
    blob: Blob
    lr_mult: float
    decay_mult: float


def collect_learnable(layers: Sequence[Layer]) -> list[Learnable]:
    """All learned blobs, bottom to top; has blobs that are shared by name share memory.

    Raises:
        PrototxtError: Blobs that are to be shared do not fit.
    """
    found: list[Learnable] = []
    owners: dict[str, tuple[int, str]] = {}  # by shared name: place in `found`, field that set it
    for layer in layers:
        for number, blob in enumerate(layer.blobs):
            spec = layer.param.param[number] if number < len(layer.param.param) else None
            shared = str(spec.name) if spec is not None else ""
            if shared in owners and shared:
                _share(layer, number, found[owners[shared][0]])
                continue
            if shared:
                owners[shared] = (len(found), layer.name)
            found.append(
                Learnable(
                    f"{layer.name}[{number}]",
                    blob,
                    decimal(spec.lr_mult) if spec is not None else 1.0,
                    decimal(spec.decay_mult) if spec is not None else 1.0,
                )
            )
    return found


def _share(layer: Layer, number: int, owner: Learnable) -> None:
    spec, blob = layer.param.param[number], layer.blobs[number]
    permissive = spec.share_mode == _PERMISSIVE
    if blob.shape != owner.blob.shape and not (permissive and blob.count == owner.blob.count):
        raise layer.error(
            f"blob {number} of shape {blob.shape} cannot be shared with {owner.name} of shape "
            f"{owner.blob.shape}",
            *("param", number, "name"),
        )
    for field, value in (("lr_mult", owner.lr_mult), ("decay_mult", owner.decay_mult)):
        if spec.HasField(field) and decimal(getattr(spec, field)) != value:
            raise layer.error(
                f"{field} {decimal(getattr(spec, field)):g} differs from {value:g} of {owner.name}, which "
                "it shares",
                *("param", number, field),
            )
    blob.share(owner.blob)
