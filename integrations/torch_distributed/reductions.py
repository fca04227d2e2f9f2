"""Reductions as torch.distributed names them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed import ReduceOp

from multiring.errors import UsageError
from multiring.types import ReduceOpName

__all__ = ["Reduction", "reduction_of"]

_NATIVE: dict[Any, ReduceOpName] = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "average",
    ReduceOp.PRODUCT: "product",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.PREMUL_SUM: "sum",
    ReduceOp.BAND: "bitwise_and",
    ReduceOp.BOR: "bitwise_or",
    ReduceOp.BXOR: "bitwise_xor",
}


class Reduction(NamedTuple):
    """How tensors are reduced.

    Attributes:
        op: As the core calls it.
        prescale: Factor of each input (PREMUL_SUM).
    """

    op: ReduceOpName
    prescale: float = 1.0


def reduction_of(op: Any, tensor: torch.Tensor, what: str) -> Reduction:
    """The reduction that an operation's options ask for.

    Args:
        op: A `ReduceOp`, or a member of it.
        tensor: To be reduced.
        what: The operation, for messages.

    Raises:
        UsageError: There is no such reduction of this dtype.
    """
    kind = next((known for known in _NATIVE if op == known), None)
    if kind is None:
        raise UsageError(
            f"{what}: {op} is not supported; SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM are"
        )
    if tensor.is_complex() and kind not in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM):
        raise UsageError(f"{what} of complex numbers takes SUM, AVG or PREMUL_SUM, not {op}")
    name = _NATIVE[kind].replace("_", " ")
    if tensor.is_floating_point() and name.startswith("bitwise"):
        raise UsageError(f"{what}: there is no {name} of {tensor.dtype}; integers and bool have one")
    if kind == ReduceOp.PREMUL_SUM:
        # A number, or a tensor with one; older versions of torch tell it to a pickler alone.
        factor = op.factor if hasattr(op, "factor") else op.__getstate__()[1]
        if isinstance(factor, torch.Tensor) and factor.numel() != 1:
            raise UsageError(f"{what}: PREMUL_SUM takes one factor, not a tensor of {factor.numel()}")
        return Reduction("sum", float(factor))
    if kind == ReduceOp.SUM and tensor.dtype == torch.bool:
        return Reduction("max")  # as in NCCL's and Gloo's groups: true where any rank has true
    return Reduction(_NATIVE[kind])
