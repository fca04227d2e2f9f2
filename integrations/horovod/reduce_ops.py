"""Horovod's names of reductions: distinct numbers."""

from __future__ import annotations

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "Sum", "op_name", "resolve_op"]

Average = 0
Sum = 1
Adasum = 2
Min = 3
Max = 4
Product = 5

_NAMES: dict[int | None, str] = {
    Average: "average",
    Sum: "sum",
    Adasum: "adasum",
    Min: "min",
    Max: "max",
    Product: "product",
}


def op_name(op: int | None) -> str:
    """The name that the core has for a reduction.

    Raises:
        ValueError: It is none of them.
    """
    try:
        return _NAMES[op]
    except (KeyError, TypeError):
        raise ValueError(
            f"op is {op!r}; expected hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max or hvd.Product"
        ) from None


def resolve_op(op: int | None, average: bool | None) -> int:
    """The reduction that `op` and the old argument `average` ask for; Average by default.

    Raises:
        ValueError: Both are given.
    """
    if op is not None:
        if average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        return op
    return Average if average is None or average else Sum
