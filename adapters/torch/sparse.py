"""Sparse gradients, as `torch.nn.Embedding(sparse=True)` makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from multiring.gradient_reducer import ReducerOptions
from multiring.sparse_rows import union_of_rows
from numpy.typing import NDArray

import torch

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["reduce_rows", "sparse_parameters"]


def sparse_parameters(module: torch.nn.Module) -> set[int]:
    """Identities of the parameters whose layers announce sparse gradients."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {id(part.weight) for part in module.modules() if isinstance(part, kinds) and part.sparse}


def reduce_rows(
    comm: Communicator | None,
    gradient: torch.Tensor | None,
    shape: torch.Size,
    dtype: torch.dtype,
    name: str,
    options: ReducerOptions,
    active: int,
) -> torch.Tensor:
    """Reduce a gradient that is sparse in its first dimension. Collective.

    Args:
        comm: Ranks that train together; None with one rank.
        gradient: This rank's gradient, sparse or dense; None if it has none.
        shape: Shape of the parameter.
        dtype: Its dtype.
        name: Name of the parameter.
        options: How to reduce.
        active: Number of ranks that have data: what averages divide by.

    Returns:
        The reduced gradient, sparse and coalesced, with the same bits on every rank.
    """
    rows, values = _rows_and_values(gradient, shape, dtype)
    if comm is None:
        union, total = rows, values * options.scale
    else:
        union, positions = union_of_rows(comm, rows, name)
        total = torch.zeros((len(union), *shape[1:]), dtype=dtype)
        total[torch.from_numpy(positions)] = values
        flat = (torch.view_as_real(total) if total.is_complex() else total).view(-1)
        comm.allreduce(
            flat,
            op=options.op,
            out=flat,
            name=f"values of {name}",
            prescale=options.prescale,
            postscale=options.postscale,
        )
        if options.op == "average" and 0 < active < comm.size:
            total *= comm.size / active
    indices = torch.from_numpy(union).unsqueeze(0)
    return torch.sparse_coo_tensor(indices, total, shape, is_coalesced=True, check_invariants=False)


def _rows_and_values(
    gradient: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype
) -> tuple[NDArray[np.int64], torch.Tensor]:
    """This rank's rows, ascending and unique, and their values. Shapes (n,) and (n, *shape[1:])."""
    if gradient is None:
        return np.empty(0, dtype=np.int64), torch.empty((0, *shape[1:]), dtype=dtype)
    if not (gradient.is_sparse and gradient.sparse_dim() == 1):
        gradient = gradient.to_dense().to_sparse(1)
    gradient = gradient.coalesce()
    return gradient.indices()[0].numpy(), gradient.values()
