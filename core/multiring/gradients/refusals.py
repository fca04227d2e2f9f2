"""What a program must not do with its gradients: the errors that say so."""

from __future__ import annotations

from typing import Any

import numpy as np

from multiring.arrays import without_mask
from multiring.errors import UsageError
from multiring.gradients.bucketing import ParameterSpec

__all__ = ["check_gradient", "cleared_too_late", "one_array", "second_gradient"]

_NO_REAL_NUMBERS = "cOSUmM"  # kinds of dtypes that NumPy converts to real numbers with a loss, or not at all


def check_gradient(rank: int, spec: ParameterSpec, gradient: Any) -> None:
    """Raise UsageError unless an array that the program gives can be the gradient of a parameter.

    NumPy itself would broadcast an array of another shape, and drop an imaginary part or a mask.
    """
    array = np.asarray(without_mask(gradient, f"rank {rank}: the gradient of '{spec.name}'"))
    if array.shape != tuple(spec.shape) or array.dtype.kind in _NO_REAL_NUMBERS:
        raise _refusal(
            rank,
            spec.name,
            f"the gradient of '{spec.name}' is {array.dtype} {array.shape}, but the parameter is "
            f"{spec.dtype} {tuple(spec.shape)}; pass an array of real numbers of that shape",
        )


def one_array(rank: int, first: str, second: str) -> UsageError:
    """Two gradients of a round have one memory."""
    return _refusal(
        rank,
        second,
        f"parameters '{first}' and '{second}' have the same array as their gradients, which would be "
        "averaged twice; give each a copy of its own",
    )


def second_gradient(rank: int, name: str) -> UsageError:
    """A gradient is ready that has already been sent in this round."""
    return _refusal(
        rank,
        name,
        f"parameter '{name}' received a second gradient after the first one had been sent; put all backward "
        "passes of a step but the last into no_sync(), and checkpoint a part that occurs several times with "
        "use_reentrant=False",
    )


def cleared_too_late(rank: int, name: str) -> UsageError:
    """Gradients are cleared in a round that may have sent one of them."""
    return _refusal(
        rank,
        name,
        f"gradients are to be forgotten, but that of '{name}' was said to be ready and may have left; end "
        "the round first (synchronize)",
    )


def _refusal(rank: int, name: str, text: str) -> UsageError:
    return UsageError(f"rank {rank}: {text}", rank=rank, tensor=name)
