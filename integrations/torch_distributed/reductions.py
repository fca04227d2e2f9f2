"""Reductions as torch.distributed names them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
}
_BITWISE: dict[Any, tuple[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    ReduceOp.BAND: ("bitwise and", torch.bitwise_and),
    ReduceOp.BOR: ("bitwise or", torch.bitwise_or),
    ReduceOp.BXOR: ("bitwise xor", torch.bitwise_xor),
}


@dataclass(frozen=True)
class Reduction:
    """How tensors are reduced.

    Attributes:
        op: As the core calls it; bitwise operations, which it lacks, are done by gathering.
        prescale: Factor of each input (PREMUL_SUM).
        bitwise: What combines two tensors, if it is a bitwise operation.
        name: Of a bitwise operation.
    """

    op: ReduceOpName
    prescale: float = 1.0
    bitwise: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    name: str = ""

    def combine(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The bitwise reduction of tensors."""
        assert self.bitwise is not None
        result = tensors[0].clone()
        for tensor in tensors[1:]:
            result = self.bitwise(result, tensor)
        return result


def reduction_of(op: Any, tensor: torch.Tensor, what: str) -> Reduction:
    """The reduction that an operation's options ask for.

    Args:
        op: A `ReduceOp`, or a member of it.
        tensor: To be reduced.
        what: The operation, for messages.

    Raises:
        UsageError: There is no such reduction of this dtype.
    """
    kind = next((known for known in (*_NATIVE, *_BITWISE) if op == known), None)
    if kind is None:
        raise UsageError(
            f"{what}: {op} is not supported; SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM are"
        )
    if tensor.is_complex() and kind not in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM):
        raise UsageError(f"{what} of complex numbers takes SUM, AVG or PREMUL_SUM, not {op}")
    if kind in _BITWISE:
        name, function = _BITWISE[kind]
        if tensor.is_floating_point() or tensor.is_complex():
            raise UsageError(f"{what}: there is no {name} of {tensor.dtype}; integers and bool have one")
        return Reduction("sum", bitwise=function, name=name)
    if kind == ReduceOp.PREMUL_SUM:
        # A number, or a tensor with one; older versions of torch tell it to a pickler alone.
        factor = op.factor if hasattr(op, "factor") else op.__getstate__()[1]
        if isinstance(factor, torch.Tensor) and factor.numel() != 1:
            raise UsageError(f"{what}: PREMUL_SUM takes one factor, not a tensor of {factor.numel()}")
        return Reduction("sum", float(factor))
    return Reduction(_NATIVE[kind])
