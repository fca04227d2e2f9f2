"""The numbers by which an optimizer updates parameters, to be compared over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Number

import numpy as np

import torch
from multiring.torch.buffers import as_array

__all__ = ["hyperparameters"]


def hyperparameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, object]]:
    """Learning rates, and what other numbers an optimizer reads in its groups; none of the program's own."""
    yield "type of the optimizer", type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        yield f"parameters of parameter group {number}", len(group["params"])
        for key in sorted(group.keys() & optimizer.defaults.keys()):
            value = group[key]
            if _is_numeric(value):
                shown = as_array(value) if isinstance(value, torch.Tensor) else value
                yield f"{key} of parameter group {number}", shown


def _is_numeric(value: object) -> bool:
    """Whether it enters into the update; names, paths and objects may be each rank's own."""
    if isinstance(value, list | tuple):
        return all(map(_is_numeric, value))
    return value is None or isinstance(value, Number | np.generic | torch.Tensor)
