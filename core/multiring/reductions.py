"""Names of reductions, of what crosses from host to host, and of arguments that other libraries have."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from multiring import _core as native
from multiring.errors import UsageError
from multiring.types import CommDtypeName

__all__ = ["comm_dtype_name", "explain_arguments", "native_comm_dtype", "reduce_op", "renamed_wire"]

P = ParamSpec("P")
R = TypeVar("R")

_NARROW = "set MULTIRING_COMM_DTYPE=bfloat16 for all allreduces of float32 that cross hosts (docs/tuning.md)"
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
    "comm_dtype": _NARROW,
    "wire": _NARROW,
}

_OPS = {
    "sum": native.ReduceOp.SUM,
    "average": native.ReduceOp.AVERAGE,
    "min": native.ReduceOp.MIN,
    "max": native.ReduceOp.MAX,
    "product": native.ReduceOp.PRODUCT,
}

_COMM_DTYPES: dict[CommDtypeName, native.CommDtype] = {
    "float32": native.CommDtype.FLOAT32,
    "float16": native.CommDtype.FLOAT16,
    "bfloat16": native.CommDtype.BFLOAT16,
}


def reduce_op(name: str) -> native.ReduceOp:
    """The native counterpart of a reduction's name; raises UsageError if there is none."""
    try:
        return _OPS[name]
    except (KeyError, TypeError):
        raise UsageError(f"op is {name!r}; accepted: {', '.join(_OPS)}") from None


def native_comm_dtype(name: CommDtypeName | None) -> native.CommDtype:
    """The native counterpart of what crosses from host to host; raises UsageError if there is none."""
    if name is None:
        return native.CommDtype.DEFAULT
    try:
        return _COMM_DTYPES[name]
    except (KeyError, TypeError):
        raise UsageError(f"comm_dtype is {name!r}; accepted: {', '.join(_COMM_DTYPES)} and None") from None


def comm_dtype_name(comm_dtype: native.CommDtype) -> CommDtypeName:
    """The name of a communication dtype that is not the default one."""
    return next(name for name, known in _COMM_DTYPES.items() if known == comm_dtype)


def renamed_wire(name: Any) -> Any:
    """The argument `comm_dtype` by its former name, `wire`, which is accepted until the first release."""
    warnings.warn("the argument wire is now called comm_dtype", DeprecationWarning, stacklevel=3)
    return name


def explain_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Lets a function say what takes the place of a keyword argument that it does not have, and take one by
    its former name.

    Raises:
        TypeError: From the function, for such an argument.
    """
    accepted = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if "wire" in kwargs and "comm_dtype" in accepted:
            kwargs["comm_dtype"] = renamed_wire(kwargs.pop("wire"))
        for name in kwargs:
            if name not in accepted and name in _INSTEAD:
                title = function.__qualname__.removesuffix(".__init__")
                raise TypeError(f"{title} has no argument {name!r}: {_INSTEAD[name]}")
        return function(*args, **kwargs)

    return checked
