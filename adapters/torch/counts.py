"""What Torch counts of a tensor: writes to it, and references to it and to its memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from multiring import _core

__all__ = ["has_own_memory", "is_held_by_graph", "is_reducible_in_place", "plain_gradients", "version"]

Tensor = torch.Tensor

# Both are private; a Torch without them costs a copy of each gradient, and buffers that wait for no need.
_count_storage: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
_count_tensor: Callable[[Tensor], int] | None = getattr(Tensor, "_use_count", None)


def version(tensor: Tensor) -> int:
    """Grows with each write that Torch sees; -1 where it does not count them."""
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode
        return -1


def has_own_memory(tensor: Tensor) -> bool:
    """Whether no other tensor is known to share its memory."""
    return _storage_users(tensor) == _ALONE


def is_reducible_in_place(gradient: Tensor) -> bool:
    """Whether a reduction may write to the memory of a gradient.

    No other tensor and no graph has that memory, and it holds the elements as they are.
    """
    return (
        gradient.layout is torch.strided
        and not gradient.requires_grad
        and not gradient.is_neg()
        and not gradient.is_conj()
        and has_own_memory(gradient)
    )


def plain_gradients(count: int) -> _core.TensorGradients:
    """As many gradients; those that are alone in their memory are known by the count above."""
    return _core.TensorGradients(count, _count_storage, torch.zeros(1, device="cpu"))


def is_held_by_graph(tensor: Tensor) -> bool:
    """Whether autograd may have saved the tensor, or a view of it, for a backward pass that is still to come:
    anything but Python refers to it."""
    return _count_tensor is None or _count_tensor(tensor) > 1 or not has_own_memory(tensor)


def _storage_users(tensor: Tensor) -> int:
    return 0 if _count_storage is None else _count_storage(tensor.untyped_storage()._cdata)


_ALONE = _storage_users(torch.zeros(1, device="cpu")) or -1
