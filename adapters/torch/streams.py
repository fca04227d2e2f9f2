"""What streams of CUDA devices have to wait for."""

from __future__ import annotations

import torch

__all__ = ["used_here", "wait_for_stream"]


def used_here(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, which may have been made on another stream than the current one: when it is let go of, its
    memory is not used again before the current stream has done what it has been given by then."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def wait_for_stream(other: torch.cuda.Stream) -> None:
    """Later work of this thread's current stream on the same device comes after what the other has now."""
    current = torch.cuda.current_stream(other.device)
    if current.cuda_stream != other.cuda_stream:
        current.wait_stream(other)
