"""ChainerMN's collectives of arrays, over the core.

Arrays of different shapes may meet in one call, so their descriptions travel first, as ChainerMN has it; what
does not fit is found out from these by every rank alike, before any data moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import chainer
from multiring import Communicator
from multiring.chainer.arrays import (
    Array,
    check_dtype,
    check_same_dtype,
    is_array,
    on_device,
    to_device,
    to_host,
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
    found = comm.broadcast_object(found, root)
    if isinstance(found, Exception):
        raise found
    return found


def _pieces(flat: Array, shapes: Sequence[tuple[int, ...]], device: bool) -> tuple[Any, ...]:
    """Cut a flat array into arrays of these shapes."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    parts = np.split(flat, ends[:-1])
    return tuple(to_device(part.reshape(shape), device) for part, shape in zip(parts, shapes, strict=True))


def allreduce(comm: Communicator, x: Any) -> Any:
    form = _form("allreduce", x)
    return to_device(comm.allreduce(to_host(x), name="chainer allreduce"), form.device).reshape(form.shape)


def mean(comm: Communicator, x: Any, out: Any) -> None:
    """Average of `x` (or of `out` itself if None) over ranks into `out`."""
    source = out if x is None else x
    form = _form("multi-node mean", source)
    if on_device(out):
        average = comm.allreduce(to_host(source), op="average", name="chainer mean")
        out[...] = to_device(average, True).reshape(form.shape)
    else:
        comm.allreduce(to_host(source), op="average", out=out, name="chainer mean")
    if chainer.is_debug() and not np.isfinite(to_host(out)).all():
        raise ValueError("Parameters diverged after allreduce.")


def bcast(comm: Communicator, x: Any, root: int) -> Any:
    """What `root` has; there, `x` itself."""
    form: _Form = _from_root(comm, root, lambda: _form("bcast", x))
    data = to_host(x) if comm.rank == root else np.empty(form.shape, form.dtype)
    comm.broadcast(data, root, out=data, name="chainer bcast")
    return x if comm.rank == root else to_device(data, form.device)


def gather(comm: Communicator, x: Any, root: int) -> tuple[Any, ...] | None:
    forms: list[_Form] = comm.allgather_object(_form("gather", x))
    check_same_dtype("gather", (form.dtype for form in forms))
    joined = comm.gather(to_host(x).reshape(-1), root, name="chainer gather")
    return None if joined is None else _pieces(joined, [form.shape for form in forms], on_device(x))


def allgather(comm: Communicator, x: Any) -> tuple[Any, ...]:
    forms: list[_Form] = comm.allgather_object(_form("allgather", x))
    check_same_dtype("allgather", (form.dtype for form in forms))
    joined = comm.allgather(to_host(x).reshape(-1), name="chainer allgather")
    return _pieces(joined, [form.shape for form in forms], on_device(x))


def alltoall(comm: Communicator, xs: Sequence[Any]) -> tuple[Any, ...]:
    if len(xs) != comm.size:
        raise ValueError("The length of data must be same as communicator size.")
    every: list[list[_Form]] = comm.allgather_object([_form("alltoall", x) for x in xs])
    check_same_dtype("alltoall", (form.dtype for forms in every for form in forms))
    parts = [to_host(x).reshape(-1) for x in xs]
    received = comm.alltoall(np.concatenate(parts), [part.size for part in parts], name="chainer alltoall")
    return _pieces(received[0], [forms[comm.rank].shape for forms in every], on_device(xs[0]))


def scatter(comm: Communicator, xs: Any, root: int) -> Any:
    """Array i of `root`'s tuple, or row i of its array, on rank i."""
    forms: list[_Form] = _from_root(comm, root, lambda: _scatter_forms(xs, comm.size))
    if comm.rank == root:
        parts = [to_host(x).reshape(-1) for x in xs]
        data, splits = np.concatenate(parts), [part.size for part in parts]
    else:
        data, splits = np.empty(0, forms[0].dtype), [0] * comm.size
    received = comm.alltoall(data, splits, name="chainer scatter")
    mine = forms[comm.rank]
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
    return forms
