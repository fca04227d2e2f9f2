"""What tensors and reductions are accepted, and how tensors are handed to the core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from multiring.arrays import arrived
from multiring.horovod.basics import after
from multiring.horovod.operations import Start
from multiring.horovod.process_sets import ProcessSet
from multiring.horovod.request import Request
from multiring.torch_distributed.late import LateResults, parts_of
from multiring.torch_distributed.streams import CallerWork, why_captured

__all__ = [
    "MOVED",
    "REDUCED",
    "changed",
    "checked",
    "described",
    "dtype_name",
    "late",
    "ordered",
    "settle",
    "zeros",
]

Tensor = torch.Tensor

late = LateResults()
after("shutdown", late.clear)

REDUCED = {torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64}
MOVED = REDUCED | {torch.uint8, torch.int8, torch.int16, torch.bool}

_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in MOVED}


def zeros(request: Request) -> Tensor:
    """Zeros of the dtype and shape of a request; on the host, wherever the tensors of other ranks are."""
    return torch.zeros(request.shape, dtype=getattr(torch, request.dtype), device="cpu")


def checked(tensor: Tensor, accepted: set[torch.dtype]) -> Tensor:
    tensor = arrived(tensor)
    late.settle([tensor])
    if tensor.is_sparse or tensor.dtype not in accepted:
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")
    if not (tensor.is_cpu or tensor.is_cuda):
        raise ValueError(
            f"Tensor is on {tensor.device}; only tensors on the CPU and on CUDA devices are supported. Use "
            "tensor.cpu()."
        )
    if tensor.is_cuda and (reason := why_captured(tensor.device)) is not None:
        raise ValueError(reason)
    return tensor.detach() if tensor.requires_grad else tensor


def settle(tensors: Sequence[Tensor], process_set: ProcessSet, *, is_written: bool = False) -> None:
    """Wait until tensors that the library is about to copy hold what operations before have made of them;
    with `is_written`, until it may write to them, because operations before have read them."""
    if not is_written:
        late.settle(tensors)
    for tensor in tensors:
        for part in parts_of(tensor):
            process_set.operations().await_queued(part, is_written=is_written)


def changed(tensor: Tensor) -> Tensor:
    """The tensor, whose values autograd did not see change."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
    return tensor


def dtype_name(tensor: Tensor) -> str:
    return _NAMES[tensor.dtype]


def ordered(tensor: Tensor, start: Start) -> Start:
    """What submits an operation of a tensor: on a CUDA device after the work that this thread's stream has
    now, whichever thread submits it, and if it is submitted again."""
    if not tensor.is_cuda:
        return start
    caller = CallerWork(tensor.device)

    def submit(queue: Any) -> Any:
        with caller.before():
            return start(queue)

    return submit


def described(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{dtype_name(tensor)}{list(tensor.shape)}" for tensor in tensors)
