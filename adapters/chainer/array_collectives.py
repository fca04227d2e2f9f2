"""ChainerMN's collectives of arrays, over the core.

Arrays of different shapes may meet in one call, so their descriptions travel first, as ChainerMN has it; what
does not fit is found out from these by every rank alike, before any data moves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import chainer
from multiring import Communicator
from multiring.chainer.arrays import (
    check_dtype,
    check_same_dtype,
    empty,
    is_array,
    joined,
    on_device,
    ordered,
    to_device,
)

__all__ = ["allgather", "allreduce", "alltoall", "bcast", "gather", "mean", "scatter"]


class _Form(NamedTuple):
    """What the other ranks have to know of an array."""

    shape: tuple[int, ...]
    dtype: str
    device: bool


def _form(operation: str, x: Any) -> _Form:
    if isinstance(x, tuple | list):
        raise TypeError(f"{operation} cannot handle tuple data; pass one array")
    if not is_array(x):
        raise TypeError(f"{operation} takes an array of NumPy or CuPy, not {type(x).__name__}")
    check_dtype(operation, x)
    return _Form(tuple(x.shape), x.dtype.name, on_device(x))


def _from_root(comm: Communicator, root: int, make: Callable[[], Any]) -> Any:
    """What `make` returns on `root`; every rank raises what it raises there."""
    found: Any = None
    if comm.rank == root:
        try:
            found = make()
        except (TypeError, ValueError) as error:
            found = error
    found = comm.broadcast_object(found, root, name="chainer array")
    if isinstance(found, Exception):
        raise found
    return found


def _check_one_place(operation: str, forms: Sequence[_Form]) -> None:
    if len({form.device for form in forms}) > 1:
        raise TypeError(f"{operation}: the arrays of a call have to be all of CuPy or all of NumPy")


def _pieces(flat: Any, shapes: Sequence[tuple[int, ...]]) -> tuple[Any, ...]:
    """Cut a flat array into arrays of these shapes."""
    sizes = [math.prod(shape) for shape in shapes]
    ends = itertools.accumulate(sizes)
    return tuple(
        flat[end - size : end].reshape(shape) for end, size, shape in zip(ends, sizes, shapes, strict=True)
    )


def allreduce(comm: Communicator, x: Any) -> Any:
    _form("allreduce", x)
    return comm.allreduce(ordered(x), name="chainer allreduce")


def mean(comm: Communicator, x: Any, out: Any) -> None:
    """Average of `x` (or of `out` itself if None) over ranks into `out`."""
    source = out if x is None else x
    _form("multi-node mean", source)
    comm.allreduce(ordered(source), op="average", out=out, name="chainer mean")
    if chainer.is_debug() and not chainer.backend.get_array_module(out).isfinite(out).all():
        raise ValueError("Parameters diverged after allreduce.")


def bcast(comm: Communicator, x: Any, root: int) -> Any:
    """What `root` has; there, `x` itself."""
    form: _Form = _from_root(comm, root, lambda: _form("bcast", x))
    data = ordered(x) if comm.rank == root else empty(form.shape, form.dtype, form.device)
    comm.broadcast(data, root, out=data, name="chainer bcast")
    return x if comm.rank == root else to_device(data, form.device)


def gather(comm: Communicator, x: Any, root: int) -> tuple[Any, ...] | None:
    forms: list[_Form] = comm.allgather_object(_form("gather", x), name="chainer gather")
    check_same_dtype("gather", (form.dtype for form in forms))
    gathered = comm.gather(ordered(x).reshape(-1), root, name="chainer gather")
    return None if gathered is None else _pieces(gathered, [form.shape for form in forms])


def allgather(comm: Communicator, x: Any) -> tuple[Any, ...]:
    forms: list[_Form] = comm.allgather_object(_form("allgather", x), name="chainer allgather")
    check_same_dtype("allgather", (form.dtype for form in forms))
    shapes = [form.shape for form in forms]
    gathered = empty((sum(map(math.prod, shapes)),), x.dtype, on_device(x))
    comm.allgather(ordered(x).reshape(-1), out=gathered, name="chainer allgather")
    return _pieces(gathered, shapes)


def alltoall(comm: Communicator, xs: Sequence[Any]) -> tuple[Any, ...]:
    if len(xs) != comm.size:
        raise ValueError("The length of data must be same as communicator size.")
    own = [_form("alltoall", x) for x in xs]
    every: list[list[_Form]] = comm.allgather_object(own, name="chainer alltoall")
    check_same_dtype("alltoall", (form.dtype for forms in every for form in forms))
    for forms in every:
        _check_one_place("alltoall", forms)
    received = comm.alltoall(joined(xs), [x.size for x in xs], name="chainer alltoall")
    return _pieces(received[0], [forms[comm.rank].shape for forms in every])


def scatter(comm: Communicator, xs: Any, root: int) -> Any:
    """Array i of `root`'s tuple, or row i of its array, on rank i."""
    forms: list[_Form] = _from_root(comm, root, lambda: _scatter_forms(xs, comm.size))
    if comm.rank == root:
        data, splits = joined(list(xs)), [x.size for x in xs]
    else:
        data, splits = np.empty(0, forms[0].dtype), [0] * comm.size
    received = comm.alltoall(data, splits, name="chainer scatter")
    mine = forms[comm.rank]
    # Of the device's if this rank has given such arrays; where it has given none, the core names no device.
    return to_device(received[0].reshape(mine.shape), mine.device)


def _scatter_forms(xs: Any, size: int) -> list[_Form]:
    if is_array(xs) and xs.ndim == 0:
        raise TypeError("scatter takes an array whose first axis is split, or a tuple of arrays")
    if len(xs) != size:
        raise ValueError(
            f"scatter received {len(xs)} arrays; the length of xs must be the communicator size, {size}"
        )
    forms = [_form("scatter", x) for x in xs]
    check_same_dtype("scatter", (form.dtype for form in forms))
    _check_one_place("scatter", forms)
    return forms
