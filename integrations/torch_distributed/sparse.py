"""Allreduce of sparse tensors, such as the gradients of `torch.nn.Embedding(sparse=True)`."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.distributed import ReduceOp

from multiring.communicator import Communicator
from multiring.errors import UsageError
from multiring.torch_distributed.tensors import as_numbers
from multiring.torch_distributed.work import Part, Pending

__all__ = ["allreduce_sparse"]


def allreduce_sparse(comm: Communicator, tensor: torch.Tensor, op: Any, what: str) -> Part:
    """Adds up a sparse tensor (COO) over all ranks, in place; afterwards it is coalesced.

    Every rank gathers the entries of all and adds up those of one index in the order of the ranks, so all
    have the same bits. The bytes grow with the number of ranks: it pays where ranks have few entries.

    Raises:
        UsageError: It has another layout, or lies on a device, or `op` is neither SUM nor AVG.
    """
    if tensor.layout != torch.sparse_coo:
        kind = str(tensor.layout).removeprefix("torch.")
        raise UsageError(
            f"{what} of a {kind} tensor is not supported by the backend 'multiring'; sparse_coo is"
        )
    if tensor.device.type != "cpu":
        raise UsageError(
            f"{what} of a sparse tensor on {tensor.device} is not supported by the backend 'multiring', "
            "which adds up the entries of all ranks on the CPU; pass tensor.cpu(), or a dense tensor"
        )
    # A `ReduceOp` equals members of its enumeration; those do not equal it.
    if not (op == ReduceOp.SUM or op == ReduceOp.AVG):
        raise UsageError(f"{what} of a sparse tensor takes SUM or AVG, not {op}")
    if tensor._base is not None and tensor._base.is_complex():
        # torch passes a view of real numbers, and new entries of a view are not those of its base.
        tensor = tensor._base
    own = tensor.detach().coalesce()
    values = as_numbers(own.values(), what)
    # Names are compared before data moves, and with them what has to be equal on all ranks.
    how = "average" if op == ReduceOp.AVG else "sum"
    name = f"{what} ({how}) of shape {tuple(own.shape)}, {own.sparse_dim()} dimensions of it sparse"
    pending = _Both(
        comm.allgather_async(own.indices().t().contiguous(), name=f"indices of a sparse {name}"),
        comm.allgather_async(values.contiguous(), name=f"values of a sparse {name}"),
    )

    def finish(gathered: list[torch.Tensor]) -> None:
        indices, numbers = gathered
        whole = torch.view_as_complex(numbers) if own.is_complex() else numbers
        total = torch.sparse_coo_tensor(indices.t(), whole, own.shape, check_invariants=False).coalesce()
        with torch.no_grad():  # not on a detached tensor: that would get the entries alone
            tensor.copy_(total / comm.size if op == ReduceOp.AVG else total)

    return Part(pending, finish)


class _Both:
    """Two operations, waited for together."""

    def __init__(self, *parts: Pending) -> None:
        self._parts = parts

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def wait(self, timeout: float | None = None) -> list[Any]:
        """What they return."""
        until = None if timeout is None else time.monotonic() + timeout
        return [
            part.wait(None if until is None else max(0.0, until - time.monotonic())) for part in self._parts
        ]
