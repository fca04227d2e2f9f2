"""Initial values of learned blobs, as Caffe draws them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from multiring.models.caffe.blob import Blob, decimal
from multiring.models.caffe.prototxt import Location

__all__ = ["fill"]

_FAN_IN, _FAN_OUT, _AVERAGE = 0, 1, 2


def fill(blob: Blob, filler: Any, location: Location, generator: torch.Generator) -> None:
    """Set a blob's values by a `FillerParameter`.

    Numbers are drawn in float64 and rounded, so that nets of both dtypes start alike.

    Args:
        blob: What to fill.
        filler: The message.
        location: Where it stands.
        generator: Source of random numbers.

    Raises:
        PrototxtError: The type is not supported.
    """
    if filler.type not in _FILLERS:
        raise location.error(
            f"filler type {filler.type!r} is not supported; choose one of {', '.join(sorted(_FILLERS))}",
            "type",
        )
    values = torch.empty(blob.shape, dtype=torch.float64)
    _FILLERS[filler.type](values, filler, generator)
    blob.tensor.copy_(values)


def _fan(values: torch.Tensor, filler: Any) -> float:
    inputs = values.numel() / max(1, values.shape[0] if values.dim() else 1)
    outputs = values.numel() / max(1, values.shape[1]) if values.dim() > 1 else values.numel()
    average = (inputs + outputs) / 2
    return {_FAN_IN: inputs, _FAN_OUT: outputs, _AVERAGE: average}[filler.variance_norm] or 1.0


def _constant(values: torch.Tensor, filler: Any, generator: torch.Generator) -> None:
    values.fill_(decimal(filler.value))


def _uniform(values: torch.Tensor, filler: Any, generator: torch.Generator) -> None:
    values.uniform_(decimal(filler.min), decimal(filler.max), generator=generator)


def _gaussian(values: torch.Tensor, filler: Any, generator: torch.Generator) -> None:
    values.normal_(decimal(filler.mean), decimal(filler.std), generator=generator)


def _xavier(values: torch.Tensor, filler: Any, generator: torch.Generator) -> None:
    bound = math.sqrt(3.0 / _fan(values, filler))
    values.uniform_(-bound, bound, generator=generator)


def _msra(values: torch.Tensor, filler: Any, generator: torch.Generator) -> None:
    values.normal_(0.0, math.sqrt(2.0 / _fan(values, filler)), generator=generator)


_FILLERS: dict[str, Callable[[torch.Tensor, Any, torch.Generator], None]] = {
    "constant": _constant,
    "uniform": _uniform,
    "gaussian": _gaussian,
    "xavier": _xavier,
    "msra": _msra,
}
