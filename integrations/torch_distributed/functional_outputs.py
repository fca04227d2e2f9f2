"""Functional collectives that write to a tensor of the caller, which Inductor emits for FSDP."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as native
from torch.distributed import distributed_c10d

__all__ = ["install"]

_NAMESPACE = "_c10d_functional"
_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
_held: list[Any] = []  # as long as it lives, the implementations are in force


def install() -> None:
    """Have the functions with `out` call the methods of the process group, whichever it is.

    Torch's own go past a group that is written in Python, to a backend of torch's that such a group has not.
    """
    if _held or not hasattr(torch.ops._c10d_functional, "all_gather_into_tensor_out"):
        return
    library: Any = torch.library.Library(_NAMESPACE, "IMPL")
    _held.append(library)
    library.impl("all_gather_into_tensor_out", _all_gather, "CPU")
    if hasattr(torch.ops._c10d_functional, "reduce_scatter_tensor_out"):
        library.impl("reduce_scatter_tensor_out", _reduce_scatter, "CPU")


def _group_of(name: Any) -> Any:
    functions: Any = distributed_c10d
    return functions._resolve_process_group(name) if isinstance(name, str) else name


def _all_gather(tensor: torch.Tensor, size: int, group: Any, *, out: torch.Tensor) -> torch.Tensor:
    work = _group_of(group)._allgather_base(out, tensor)
    native._register_work(out, work)
    return out


def _reduce_scatter(
    tensor: torch.Tensor, op: str, size: int, group: Any, *, out: torch.Tensor
) -> torch.Tensor:
    options = dist.ReduceScatterOptions()
    options.reduceOp = _OPS[op.lower()]
    work = _group_of(group)._reduce_scatter_base(out, tensor, options)
    native._register_work(out, work)
    return out
