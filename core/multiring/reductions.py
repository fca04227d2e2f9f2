"""Names of reductions, and of what crosses from host to host, as the native core knows them."""

from __future__ import annotations

from multiring import _core as native
from multiring.errors import UsageError
from multiring.types import WireName

__all__ = ["reduce_op", "wire_name", "wire_type"]

_OPS = {
    "sum": native.ReduceOp.SUM,
    "average": native.ReduceOp.AVERAGE,
    "min": native.ReduceOp.MIN,
    "max": native.ReduceOp.MAX,
    "product": native.ReduceOp.PRODUCT,
}

_WIRES: dict[WireName, native.Wire] = {
    "float32": native.Wire.FLOAT32,
    "float16": native.Wire.FLOAT16,
    "bfloat16": native.Wire.BFLOAT16,
}


def reduce_op(name: str) -> native.ReduceOp:
    """The native counterpart of a reduction's name; raises UsageError if there is none."""
    try:
        return _OPS[name]
    except (KeyError, TypeError):
        raise UsageError(f"op is {name!r}; accepted: {', '.join(_OPS)}") from None


def wire_type(name: WireName | None) -> native.Wire:
    """The native counterpart of what crosses from host to host; raises UsageError if there is none."""
    if name is None:
        return native.Wire.DEFAULT
    try:
        return _WIRES[name]
    except (KeyError, TypeError):
        raise UsageError(f"wire is {name!r}; accepted: {', '.join(_WIRES)} and None") from None


def wire_name(wire: native.Wire) -> WireName:
    """The name of a wire that is not the default one."""
    return next(name for name, known in _WIRES.items() if known == wire)
