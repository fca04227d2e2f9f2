"""Names of reductions, of what crosses from host to host, and of arguments that other libraries have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from multiring import _core as native
from multiring.errors import UsageError
from multiring.types import WireName

__all__ = ["explain_arguments", "reduce_op", "wire_name", "wire_type"]

P = ParamSpec("P")
R = TypeVar("R")

_NARROW = "set MULTIRING_WIRE=bfloat16 for all allreduces of float32 that cross hosts (docs/tuning.md)"
# What takes the place of an argument that the function does not have: Horovod's, and those of other adapters.
_INSTEAD = {
    "average": "pass op='average' or op='sum'",
    "compression": _NARROW,
    "device_dense": "leave it out",
    "device_sparse": "leave it out",
    "gradient_predivide_factor": "pass prescale=1/f and postscale=f",
    "groups": "pass bucket_bytes",
    "named_parameters": "pass the model, or its named_parameters(), as the second argument",
    "num_groups": "pass bucket_bytes",
    "postscale_factor": "pass postscale",
    "prescale_factor": "pass prescale",
    "process_set": "pass a communicator of these ranks as comm, as split() returns it",
    "root_rank": "pass root",
    "wire": _NARROW,
}

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


def explain_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Lets a function say what takes the place of a keyword argument that it does not have.

    Raises:
        TypeError: From the function, for such an argument.
    """
    accepted = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in accepted and name in _INSTEAD:
                title = function.__qualname__.removesuffix(".__init__")
                raise TypeError(f"{title} has no argument {name!r}: {_INSTEAD[name]}")
        return function(*args, **kwargs)

    return checked
