"""Sparse gradients, as `torch.nn.Embedding(sparse=True)` makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

import torch
from multiring.gradients.options import ReducerOptions
from multiring.gradients.sparse_rows import SparseReduction

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["RowExchange", "sparse_parameters"]


def sparse_parameters(module: torch.nn.Module) -> set[int]:
    """Identities of the parameters whose layers announce sparse gradients."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {id(part.weight) for part in module.modules() if isinstance(part, kinds) and part.sparse}


class RowExchange:
    """The reduction of one gradient that is sparse in its first dimension. Every step is collective.

    Attributes:
        is_dense: Whether this rank's gradient is dense after all, as that of an embedding whose weight is
            that of a linear layer too; optimizers for dense gradients are used then.
    """

    def __init__(
        self,
        comm: Communicator | None,
        gradient: torch.Tensor | None,
        shape: torch.Size,
        dtype: torch.dtype,
        name: str,
        options: ReducerOptions,
    ) -> None:
        """Begin.

        Args:
            comm: Ranks that train together; None with one rank.
            gradient: This rank's gradient, sparse or dense; None if it has none.
            shape: Shape of the parameter.
            dtype: Its dtype.
            name: Its name.
            options: How to reduce.
        """
        self.is_dense = gradient is not None and not gradient.is_sparse
        self._shape, self._dtype, self._scale = shape, dtype, options.scale
        self._rows, self._values = _rows_and_values(gradient, shape, dtype)
        self._reduction = (
            None if comm is None else SparseReduction(comm, self._rows, self._scatter, name, options)
        )

    def send_values(self) -> None:
        """Second step: wait for the rows of all ranks and send the values."""
        if self._reduction is not None:
            self._reduction.send_values()

    def wait(self, active: int) -> torch.Tensor:
        """The reduced gradient, sparse and coalesced, with the same bits on every rank.

        Args:
            active: Number of ranks that have data: what averages divide by.
        """
        rows, values = self._rows, self._values * self._scale
        if self._reduction is not None:
            rows, values = self._reduction.wait(active)
            values = torch.view_as_complex(values) if self._dtype.is_complex else values
        indices = torch.from_numpy(rows).unsqueeze(0)
        return torch.sparse_coo_tensor(
            indices, values, self._shape, is_coalesced=True, check_invariants=False
        )

    def _scatter(self, count: int, positions: NDArray[np.intp]) -> torch.Tensor:
        spread = torch.zeros((count, *self._shape[1:]), dtype=self._dtype, device="cpu")
        spread[torch.from_numpy(positions)] = self._values
        return torch.view_as_real(spread) if self._dtype.is_complex else spread


def _rows_and_values(
    gradient: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype
) -> tuple[NDArray[np.int64], torch.Tensor]:
    """This rank's rows, ascending and unique, and their values. Shapes (n,) and (n, *shape[1:])."""
    if gradient is None:
        return np.empty(0, dtype=np.int64), torch.empty((0, *shape[1:]), dtype=dtype, device="cpu")
    if not (gradient.is_sparse and gradient.sparse_dim() == 1):
        gradient = gradient.to_dense().to_sparse(1)
    gradient = gradient.coalesce()
    return gradient.indices()[0].numpy(), gradient.values()
