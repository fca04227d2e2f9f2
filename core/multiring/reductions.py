"""Names of reductions, of what crosses from host to host, and of arguments that other libraries have."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack

from multiring import _core as native
from multiring.errors import UsageError
from multiring.types import CommDtypeName, OrderName, ReduceOpName

__all__ = [
    "CrossingKeywords",
    "NativeReduction",
    "ReductionKeywords",
    "ScaleKeywords",
    "check_crossing",
    "comm_dtype_name",
    "explain_arguments",
    "native_crossing",
    "native_reduction",
    "reduce_op",
]

P = ParamSpec("P")
R = TypeVar("R")
K = TypeVar("K", bound=str)
N = TypeVar("N")


class ScaleKeywords(TypedDict, total=False):
    """Factors for each input before the reduction, and for the result."""

    prescale: float
    postscale: float


class CrossingKeywords(TypedDict, total=False):
    """How an allreduce crosses from host to host."""

    comm_dtype: CommDtypeName | None
    """The dtype in which float32 crosses: "bfloat16" and "float16" take half of the time on the network and
    are rounded, once for each host (and on a ring on the way) and for the result; "float32" is exact.
    MULTIRING_COMM_DTYPE if None. See docs/compression.md."""
    order: OrderName | None
    """"any" lets it add in the order of its algorithm, a ring's among them; "canonical" gives the same bits
    wherever ranks are. MULTIRING_ORDER if None. See docs/tuning.md."""


class ReductionKeywords(ScaleKeywords, CrossingKeywords, total=False):
    """Keyword arguments of a reduction; see `Communicator.allreduce`."""

    op: ReduceOpName


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
}

_OPS = {
    "sum": native.ReduceOp.SUM,
    "average": native.ReduceOp.AVERAGE,
    "min": native.ReduceOp.MIN,
    "max": native.ReduceOp.MAX,
    "product": native.ReduceOp.PRODUCT,
    "bitwise_and": native.ReduceOp.BITWISE_AND,
    "bitwise_or": native.ReduceOp.BITWISE_OR,
    "bitwise_xor": native.ReduceOp.BITWISE_XOR,
}

_COMM_DTYPES: dict[CommDtypeName, native.CommDtype] = {
    "float32": native.CommDtype.FLOAT32,
    "float16": native.CommDtype.FLOAT16,
    "bfloat16": native.CommDtype.BFLOAT16,
}


_ORDERS: dict[OrderName, native.Order] = {
    "canonical": native.Order.CANONICAL,
    "any": native.Order.ANY,
}


def reduce_op(name: str) -> native.ReduceOp:
    """The native counterpart of a reduction's name; raises UsageError if there is none."""
    try:
        return _OPS[name]
    except (KeyError, TypeError):
        raise UsageError(f"op is {name!r}; accepted: {', '.join(_OPS)}") from None


def _native(what: str, known: Mapping[K, N], default: N, name: K | None) -> N:
    """The native counterpart of a name; raises UsageError if there is none."""
    if name is None:
        return default
    try:
        return known[name]
    except (KeyError, TypeError):
        raise UsageError(f"{what} is {name!r}; accepted: {', '.join(known)} and None") from None


def comm_dtype_name(comm_dtype: native.CommDtype) -> CommDtypeName:
    """The name of a communication dtype that is not the default one."""
    return next(name for name, known in _COMM_DTYPES.items() if known == comm_dtype)


def native_crossing(
    comm_dtype: CommDtypeName | None = None, order: OrderName | None = None
) -> tuple[native.CommDtype, native.Order]:
    """The native counterpart of how an allreduce crosses hosts; raises UsageError for unknown names."""
    return (
        _native("comm_dtype", _COMM_DTYPES, native.CommDtype.DEFAULT, comm_dtype),
        _native("order", _ORDERS, native.Order.DEFAULT, order),
    )


NativeReduction = tuple[native.ReduceOp, float, float, tuple[native.CommDtype, native.Order]]
"""What `Operation.set_reduction` takes."""


def native_reduction(
    op: str = "sum", prescale: float = 1.0, postscale: float = 1.0, **crossing: Unpack[CrossingKeywords]
) -> NativeReduction:
    """From names; raises UsageError for unknown ones."""
    return reduce_op(op), prescale, postscale, native_crossing(**crossing)


def explain_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Lets a function say what takes the place of a keyword argument that it does not have. Its
    `**options: Unpack[X]` are the keys of the TypedDict X.

    Raises:
        TypeError: From the function, for a keyword argument that it does not have.
    """
    accepted = _keywords(function)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() - accepted:
            raise _unexpected(function, name)
        return function(*args, **kwargs)

    return checked


def check_crossing(function: Callable[..., Any], crossing: Mapping[str, Any]) -> None:
    """What `explain_arguments` does, for a function with the keyword arguments `CrossingKeywords` that is too
    short to be wrapped."""
    for name in crossing.keys() - CrossingKeywords.__annotations__.keys():
        raise _unexpected(function, name)


def _unexpected(function: Callable[..., Any], name: str) -> TypeError:
    title = function.__qualname__.removesuffix(".__init__")
    if name in _INSTEAD:
        return TypeError(f"{title} has no argument {name!r}: {_INSTEAD[name]}")
    near = difflib.get_close_matches(name, _keywords(function), 1)
    hint = f". Did you mean {near[0]!r}?" if near else ""
    return TypeError(f"{title}() got an unexpected keyword argument {name!r}{hint}")


@functools.cache
def _keywords(function: Callable[..., Any]) -> frozenset[str]:
    """Names of the arguments that may be passed by keyword."""
    names: set[str] = set()
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD:
            names.add(name)
        elif found := re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation)):
            names |= function.__globals__[found[1]].__annotations__.keys()
    return frozenset(names)
